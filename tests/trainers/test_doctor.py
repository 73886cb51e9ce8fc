"""The doctor: well here, and each ailment is told with its remedy."""

import importlib.metadata

import pytest

from karui.trainers import doctor


def found(name):
    return next(f for f in doctor.examine() if f.name == name)


def test_this_installation_is_well():
    lines = []
    assert doctor.report(lines.append) == 0, lines
    assert {f.name for f in doctor.examine()} >= {"python", "packages", "device", "C++ kernels", "memory", "cache", "training step"}


def test_a_missing_package_fails_and_a_missing_extra_does_not(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name in ("peft", "lm-eval"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert found("packages").state == "fail" and "peft" in found("packages").found
    assert found("extras").state == "note" and "lm-eval" in found("extras").found


def test_no_compiler(monkeypatch):
    from karui.kernels.native import library

    monkeypatch.setattr(library, "unavailable", lambda: "no C++ compiler")
    assert found("C++ kernels").state == "fail" and "g++" in found("C++ kernels").remedy
    lines = []
    assert doctor.report(lines.append) == 1
    assert any(line.startswith("FAIL  C++ kernels") and "->" in line for line in lines)


def test_a_check_that_breaks_is_a_finding(monkeypatch):
    def broken(*args):
        raise RuntimeError("broken installation")

    monkeypatch.setattr("karui.adapters.lora.attach", broken)
    assert found("training step").state == "fail" and "broken installation" in found("training step").found


@pytest.mark.parametrize("login", [True, False])
def test_wandb(monkeypatch, login):
    monkeypatch.setattr("karui.trainers.tracking.logged_in", lambda: login)
    assert found("W&B").state == ("ok" if login else "note")
