"""The shipped accelerate configurations are ones that accelerate reads, with FSDP in version 2."""

from pathlib import Path

import pytest
import yaml

import karui.configs

FOLDER = Path(karui.configs.__file__).parent / "accelerate"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.stem)
def test_accelerate_reads_it(path):
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(path))
    values = yaml.safe_load(path.read_text())
    assert found.num_processes == values["num_processes"] and found.distributed_type == values["distributed_type"]
    if found.distributed_type == "FSDP":
        assert found.fsdp_config["fsdp_version"] == 2
    assert path.read_text().startswith("# ")


def test_they_are_in_the_package():
    import tomllib

    project = tomllib.loads((FOLDER.parents[2] / "pyproject.toml").read_text())
    assert "configs/accelerate/*" in project["tool"]["setuptools"]["package-data"]["karui"]
    assert len(list(FOLDER.glob("*.yaml"))) >= 4
