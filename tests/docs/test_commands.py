"""End to end: every command of the pages parses, launches name shipped configurations, the first page's commands run in their order."""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

import karui.configs
from karui.cli import app
from karui.configs.recipe import Recipe, shipped_recipes
from karui.trainers.run import parse
from tests.trainers.conftest import _fresh_accelerate_state, rows_file, tiny_folder  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
PAGES = {p.name: p.read_text(encoding="utf-8") for p in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]}
CONFIGURATIONS = {p.name for p in (Path(karui.configs.__file__).parent / "accelerate").glob("*.yaml")}
START = r"(?:karui [a-z]|accelerate launch|torchrun |python -m karui|(?:\w+=\S+ )?python benchmarks/)"
STANDS_FOR = {"RECIPE": "lora", "MODEL": "smollm2-135m", "mine.yaml": "qlora", "recipe.yaml": "lora"}


def commands(page):
    """Whole lines, and what stands between backticks, of a page."""
    text = PAGES[page].replace("\\\n", " ")
    lines = re.findall(rf"^(?: {{4}})?({START}.*)$", text, re.M)
    return [(line, True) for line in lines] + [(part, False) for part in re.findall(rf"`({START}[^`]*)`", text)]


def recipe_of(words):
    """The recipe of a command, with its overrides, is one."""
    given = parse([STANDS_FOR.get(w, w) for w in words])
    if given.recipe in shipped_recipes():
        Recipe.load(given.recipe, given.overrides)


def check_karui(words, whole):
    group = typer.main.get_command(app)
    assert words[0] in group.commands, words
    verb = group.commands[words[0]]
    options = {name for p in verb.params for name in p.opts}
    assert {w.partition("=")[0] for w in words if w.startswith("--")} <= options, words
    if whole and "<" not in words and ">" not in words:
        verb.make_context(words[0], [STANDS_FOR.get(w, w) for w in words[1:]], parent=click.Context(group))
    if words[0] == "train" and len(words) > 1:
        recipe_of(words[1:])


def check_launch(words):
    from accelerate.commands.launch import launch_command_parser

    if "karui.trainers.run" not in words:  # only what comes before is of interest
        words = [w for w in words if w != "..."] + ["-m", "karui.trainers.run", "lora"]
    given = launch_command_parser().parse_args([{"$RANK": "1"}.get(w, w) for w in words])
    assert given.module and given.training_script == "karui.trainers.run"
    if given.config_file is not None:
        assert given.config_file in CONFIGURATIONS
    recipe_of(given.training_script_args)


def check_torchrun(words):
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(words)
    assert given.module and given.training_script in ("karui", "karui.trainers.run")
    if given.training_script == "karui":
        check_karui(given.training_script_args, whole=True)
    else:
        recipe_of(given.training_script_args)


def check_python(words):
    if words[0] == "-m":
        path = ROOT / (words[1].replace(".", "/") + ".py")
    else:
        path = ROOT / words[0]
    source = path.read_text(encoding="utf-8") + (ROOT / "benchmarks" / "figures.py").read_text(encoding="utf-8")
    assert [w for w in words if w.startswith("--") and f'"{w}"' not in source] == []


@pytest.mark.parametrize("page", sorted(p for p in PAGES if commands(p)))
def test_every_command_of_a_page_parses(page):
    for text, whole in commands(page):
        command = re.split(r" {3,}| #", text)[0]  # what follows is a remark
        words = shlex.split(command)
        if words[0] == "karui":
            check_karui(words[1:], whole)
        elif words[0] == "accelerate":
            check_launch(words[2:])
        elif words[0] == "torchrun":
            check_torchrun(words[1:])
        else:
            check_python(words[words.index("python") + 1 :])


def test_the_slurm_script_launches_every_node_with_its_rank(tmp_path):
    """Run by bash, with stand-ins for SLURM's programs and for accelerate."""
    (script,) = re.findall(r"```bash\n(.*?)```", PAGES["scale.md"], re.S)
    tools = {
        "scontrol": "echo node7; echo node8",
        "srun": 'shift; for id in 0 1; do SLURM_NODEID=$id "$@"; done',
        "accelerate": f'printf "%s\\n" "$@" > {tmp_path}/launch-$SLURM_NODEID',
    }
    for name, body in tools.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]",
           "SLURM_SUBMIT_DIR": "/shared/work"}  # fmt: skip
    subprocess.run(["bash", "-eu", "-c", script], env=env, check=True)
    from accelerate.commands.launch import launch_command_parser

    for rank in (0, 1):
        words = (tmp_path / f"launch-{rank}").read_text().splitlines()
        check_launch(words[1:])
        given = launch_command_parser().parse_args(words[1:])
        assert (given.machine_rank, given.num_machines, given.num_processes, given.main_process_ip) == (rank, 2, 16, "node7")
        run = parse(given.training_script_args)
        assert run.resume == "auto" and run.overrides == ["run.output=/shared/work/run"]
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    assert [line for line in script.splitlines() if line.startswith("#SBATCH")] == [
        "#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8"
    ]


def test_where_the_configurations_lie():
    (code,) = re.findall(r'`python -c "(import karui.configs.*?)"`', PAGES["scale.md"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {p.name for p in Path(done.stdout.strip()).glob("*.yaml")} == CONFIGURATIONS
    named = set(re.findall(r"\b[\w-]+\.yaml\b", PAGES["scale.md"])) | {"zero2.yaml", "zero3.yaml"}
    assert named - {"recipe.yaml"} == CONFIGURATIONS


def test_the_plan_for_many_gpus(tiny_folder, rows_file):  # noqa: F811
    (line,) = [text for text, _ in commands("scale.md") if text.startswith("karui plan")]
    words = ["lora" if w == "RECIPE" else w for w in shlex.split(line)[1:]]
    done = CliRunner().invoke(app, [*words, "--set", f"model.name={tiny_folder}", "--set", f"data.train={rows_file}"])
    assert done.exit_code == 0 and "32 ranks of H100" in done.output and "zero3" in done.output, done.output


def test_the_commands_of_the_first_page_run_in_their_order(tiny_folder, rows_file, tmp_path, monkeypatch, own_cache):  # noqa: F811
    """On a tiny model and tiny data in place of the page's; `make`, `source` and the server are left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    text = tmp_path / "text.txt"
    text.write_text("the sum of three and nine is twelve. " * 12, encoding="utf-8")
    small = [f"model.name={tiny_folder}", f"data.train={rows_file}", "data.eval=null", "data.holdout=4", "data.prompt=prompt",
             "data.completion=completion", "data.max_length=128", "optim.epochs=null", "optim.steps=4", "optim.batch=4", "export=[]",
             "optim.micro_tokens=256", "run.threads=1", "track.to=none", "eval.questions=[]", "eval.speed=false"]  # fmt: skip
    places = {"smollm2-135m": str(tiny_folder), "wikitext2_test.txt": str(text), "text.txt": str(text)}
    seen = set()
    for line, _ in commands("getting-started.md"):
        words = [places.get(w, w) for w in shlex.split(re.split(r" {3,}| #", line)[0])]
        if words[0] != "karui" or words[1] == "serve":
            continue
        arguments, target = words[1:], None
        if ">" in words:
            arguments, target = words[1 : words.index(">")], tmp_path / words[-1]
        if words[1] == "train":
            arguments += [x for value in small for x in ("--set", value)]
        if words[1] == "quantize":
            arguments += ["--set", "damp=0.05", "--samples", "4", "--length", "32"]
        if words[1] == "eval":
            arguments += ["--no-speed"]  # its prompts are longer than a tiny model's context
        if words[1] == "bench":
            arguments += ["--concurrency", "1", "--prompt-tokens", "8", "--new-tokens", "4"]
        done = CliRunner().invoke(app, arguments, input="hello\n\n")
        assert done.exit_code == 0, (line, done.output[-2000:], done.exception)
        if target is not None:
            target.write_text(done.output, encoding="utf-8")
        seen.add(words[1])
    assert seen == {"recipes", "train", "export", "quantize", "chat", "generate", "eval", "bench"}
    assert (tmp_path / "bench.png").is_file() and (tmp_path / "mine-w4" / "manifest.json").is_file()
    (code,) = re.findall(r"```python\n(.*?)```", PAGES["getting-started.md"], re.S)
    exec(compile(code, "docs/getting-started.md", "exec"), {})


def test_messages_that_the_troubleshooting_page_explains_are_ones_that_are_said():
    source = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "karui").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    rows = re.findall(r"^\| (.*?) \|", PAGES["troubleshooting.md"], re.M)[2:]
    messages = [
        m for row in rows for m in re.findall(r"`([^`]+)`", row) if not re.match(START, m) and not row.startswith("bitsandbytes")
    ]
    assert len(messages) >= 11
    for message in messages:
        pieces = re.split(r"\.\.\.|'[^']*'|\b[A-Z]\b|\d+|[();]", message)
        longest = max((p.strip() for p in pieces), key=len)
        assert longest in source, message
