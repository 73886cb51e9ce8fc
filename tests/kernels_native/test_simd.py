"""Reference: every vector operation of the kernels against plain loops, on each instruction set of this machine, and on ARM's where a
cross compiler (Debian's g++-aarch64-linux-gnu) and an emulator (qemu-user) are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from karui.kernels.native import isas
from karui.kernels.native.build import _COMMON, _EXTRAS, _ISAS, _cpu, compiler

SOURCES = Path(__file__).parents[2] / "karui" / "kernels" / "native"
CHECK = Path(__file__).with_name("simd_check.cpp")
PLAIN = tuple(flag for flag in _COMMON if flag not in ("-shared", "-fPIC", "-O3"))
ARM = "aarch64-linux-gnu-g++"
VNNI = ("avx512_vnni", "avx512vl")  # a CPU with these runs what avx_vnni adds to avx2, in another encoding


def ways() -> dict[str, tuple[str, ...]]:
    found = {isa: (*_ISAS[isa][1], *(flag for name, flag in _EXTRAS.get(isa, {}).items() if name in _cpu())) for isa in isas()}
    if "avx2" in found and _cpu().issuperset(VNNI):
        found["avx2 with vnni"] = (*_ISAS["avx2"][1], "-mavx512vl", "-mavx512vnni")
    return found


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[:2000]
    return done.stdout


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("way", ways())
def test_operations_are_what_they_say(way: str, tmp_path: Path) -> None:
    program = str(tmp_path / "check")
    run([str(compiler()), "-O1", *PLAIN, *ways()[way], f"-I{SOURCES}", "-o", program, str(CHECK)])
    assert run([program]) == ""


@pytest.mark.skipif(shutil.which(ARM) is None or shutil.which("qemu-aarch64") is None, reason="no cross compiler and emulator for ARM")
def test_operations_on_arm(tmp_path: Path) -> None:
    program, flags = str(tmp_path / "check"), _ISAS["neon"][1]
    run([ARM, "-static", "-O1", *PLAIN, *flags, f"-I{SOURCES}", "-o", program, str(CHECK)])
    assert run(["qemu-aarch64", program]) == ""
    for source in ("model.cpp", "train.cpp"):
        run([ARM, "-O0", "-fsyntax-only", *PLAIN, *flags, str(SOURCES / source)])
    assembly = tmp_path / "gemm.s"
    code = tmp_path / "gemm.cpp"
    code.write_text('#include "simd.h"\nI product(I sum, U w, U x) { return Dot<4>::step(sum, w, x); }\n')
    run([ARM, "-O1", *PLAIN, *flags, f"-I{SOURCES}", "-S", "-o", str(assembly), str(code)])
    assert "sdot" in assembly.read_text()


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_the_check_sees_a_wrong_operation(tmp_path: Path) -> None:
    wrong = (SOURCES / "simd.h").read_text()
    right = "INLINE V zip_high(V a, V b) { V r; EACH r[i] = (i % 2 ? b : a)[i / 4 * 4 + 2 + i % 4 / 2]; return r; }"
    assert right in wrong
    (tmp_path / "simd.h").write_text(wrong.replace(right, right.replace("+ 2 +", "+ 1 +")))
    program = tmp_path / "check"
    run([str(compiler()), "-O1", *PLAIN, f"-I{tmp_path}", "-o", str(program), str(CHECK)])
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith("zip_high\n")
