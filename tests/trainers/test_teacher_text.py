"""Behavioural: a tiny model writes answers and free text into files a recipe can read."""

import json

import pytest

from karui.configs.errors import KaruiError
from karui.trainers.teacher_text import main, write_answers, write_free


def test_answers_and_free_text(tiny_folder, rows_file, tmp_path, capsys):
    out = tmp_path / "own.jsonl"
    with pytest.raises(KaruiError, match="no column 'question' to take prompts from; it has prompt, completion"):
        write_answers(str(tiny_folder), out, data=str(rows_file), prompt="question")
    with pytest.raises(KaruiError, match="none of 3 continuations was kept"):
        write_answers(str(tiny_folder), out, data=str(rows_file), limit=3, check="contains:zebra", max_tokens=4)
    assert not list(tmp_path.glob("*own*"))
    count = write_answers(str(tiny_folder), out, data=str(rows_file), temperature=1.0, draws=6, max_tokens=60)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == count > 0 and set(rows[0]) == {"prompt", "completion"}
    assert write_free(str(tiny_folder), out, count=5, max_tokens=8) <= 5
    assert "text" in json.loads(out.read_text().splitlines()[0])
    assert main([str(tiny_folder), str(out), "--data", str(rows_file), "--check", "nonsense"]) == 2
    assert "checker 'nonsense' is not known" in capsys.readouterr().err
