"""The build system, on a small hip/ of its own: what is built, when again, and what is said when it cannot be."""

import os
import signal
import subprocess
import sys
import time

import pytest

from sglang_quantkv import build as command
from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.kernels import build, device_code, toolchain
from sglang_quantkv.kernels.build import Unit, build_module, compile_device, load, module_folder
from sglang_quantkv.kernels.targets import Target, current_target, find_target
from sglang_quantkv.kernels.toolchain import CompileFailed

UNIT = Unit("store", "k8v4", 128, 64)
EMULATED = Target("emulated_mma")


def test_unit_text():
    assert str(UNIT) == "store_k8v4_d128_p64"
    config = "quantkv::CacheConfig<quantkv::Format::kInt8, quantkv::Format::kMxfp4, 128, 64>"
    assert UNIT.module_source == f'#include "src/store_binding.h"\nQUANTKV_BIND_STORE({config})\n'
    assert UNIT.device_source.splitlines() == [
        "#define QUANTKV_DEVICE_ONLY 1",
        '#include "src/store.h"',
        f"QUANTKV_INSTANTIATE_STORE({config})",
    ]


@pytest.mark.parametrize("parts", [("stor", "int8", 128, 64), ("store", "int9", 128, 64)])
def test_unit_that_does_not_exist(parts):
    with pytest.raises(UnsupportedConfig, match="there is no"):
        Unit(*parts)


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_120", "gfx942", "gfx936", "emulated_mfma_wide"])
def test_target(name):
    assert str(find_target(name)) == name


@pytest.mark.parametrize("name", ["sm_75", "sm_9x", "gfx900", "cpu", ""])
def test_target_without_kernels(name):
    with pytest.raises(UnsupportedConfig, match="no kernels for target"):
        find_target(name)


def test_hopper_is_built_with_its_own_instructions():
    assert [find_target(name).architecture for name in ("sm_80", "sm_90")] == ["sm_80", "sm_90a"]


@pytest.mark.parametrize(
    ("hip", "capability", "architecture", "expected"),
    [(None, (9, 0), "", "sm_90"), ("7.0", None, "gfx942:sramecc+:xnack-", "gfx942"), (None, None, "", "emulated_mma")],
)
def test_current_target(monkeypatch, hip, capability, architecture, expected):
    import torch

    properties = type("Properties", (), {"gcnArchName": architecture})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(hip or capability))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    assert current_target().name == expected


def test_module_runs_and_is_loaded_once(hip_root):
    module = load(UNIT, EMULATED, hip_root)
    assert module.slots(3) == 192
    assert load(UNIT, EMULATED, hip_root) is module


def test_built_again_only_when_something_changed(hip_root, monkeypatch):
    first = build_module(UNIT, EMULATED, hip_root)
    built = first.stat().st_mtime_ns
    assert build_module(UNIT, EMULATED, hip_root) == first
    assert first.stat().st_mtime_ns == built

    folders = {module_folder(UNIT, EMULATED, hip_root)}
    folders.add(module_folder(Unit("store", "k8v4", 128, 32), EMULATED, hip_root))
    folders.add(module_folder(UNIT, Target("emulated_mfma"), hip_root))
    config = hip_root / "include/quantkv/config.h"
    config.write_text(config.read_text().replace("kPageSize_;", "kPageSize_ + 1;"))
    folders.add(module_folder(UNIT, EMULATED, hip_root))
    (hip_root / "src/new.h").touch()
    folders.add(module_folder(UNIT, EMULATED, hip_root))
    monkeypatch.setitem(build._FLAGS, EMULATED.platform, (*build._FLAGS[EMULATED.platform], "-g"))
    folders.add(module_folder(UNIT, EMULATED, hip_root))
    assert len(folders) == 6
    assert build_module(UNIT, EMULATED, hip_root).parent != first.parent


def test_another_compiler_builds_another_module(hip_root, monkeypatch):
    first = build_module(UNIT, EMULATED, hip_root)
    say = toolchain._say
    monkeypatch.setattr(toolchain, "_say", lambda command: say(command) + "another build of it")
    second = build_module(UNIT, EMULATED, hip_root)
    assert second.parent == first.parent
    assert second != first


def test_sources_do_not_depend_on_where_they_lie(hip_root):
    before = module_folder(UNIT, EMULATED, hip_root)
    moved = hip_root.rename(hip_root.with_name("elsewhere"))
    assert module_folder(UNIT, EMULATED, moved) == before


# Builds UNIT from the hip/ that it is given, in a process of its own.
BUILDER = (
    "import sys; from pathlib import Path; from sglang_quantkv.kernels.build import Unit, build_module; "
    "from sglang_quantkv.kernels.targets import Target; "
    f"print(build_module({UNIT!r}, {EMULATED!r}, Path(sys.argv[1])))"
)


def start_builder(hip_root, compiler, script):
    """A process that builds with g++, after a shell script has run."""
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *--version*) ;; *) {script};; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": str(compiler)}
    arguments = [sys.executable, "-c", BUILDER, hip_root]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_processes_that_want_the_same_module_build_it_once(hip_root, tmp_path):
    """Their compiler counts how often it is called, and takes long enough for all of them to meet."""
    calls = tmp_path / "calls"
    builders = [start_builder(hip_root, tmp_path / "slow-g++", f"echo call >> {calls}; sleep 2") for _ in range(3)]
    modules = {builder.communicate()[0] for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0, 0]
    assert len(modules) == 1
    assert calls.read_text() == "call\n"


def test_a_build_that_was_killed_leaves_nothing_in_the_way(hip_root, tmp_path):
    started = tmp_path / "started"
    builder = start_builder(hip_root, tmp_path / "stuck-g++", f"touch {started}; sleep 60")
    while not started.exists():
        time.sleep(0.05)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.communicate()
    assert build_module(UNIT, EMULATED, hip_root).exists()


def no_compilers(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH", "ROCM_HOME", "ROCM_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "_programs", lambda name, folders: iter(()))
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("sm_90", ("nvcc", "CUDA_HOME", "Install the CUDA toolkit")),
        ("gfx942", ("hipcc", "ROCM_HOME", "/opt/rocm", "Install ROCm")),
        ("gfx936", ("Hygon's DTK", "/opt/dtk")),
        ("emulated_mfma", ("g++", "Install g++")),
    ],
)
def test_no_compiler(hip_root, monkeypatch, tmp_path, target, said):
    no_compilers(monkeypatch, tmp_path)
    with pytest.raises(UnsupportedConfig) as refused:
        build_module(UNIT, Target(target), hip_root)
    for words in said:
        assert words in str(refused.value)


def test_no_compiler_for_device_code(hip_root, monkeypatch, tmp_path):
    no_compilers(monkeypatch, tmp_path)
    with pytest.raises(UnsupportedConfig, match="ziglang"):
        compile_device(UNIT, Target("gfx942"), hip_root)


def test_a_machine_without_a_compiler_takes_what_was_built(hip_root, monkeypatch, tmp_path):
    module = build_module(UNIT, EMULATED, hip_root)
    no_compilers(monkeypatch, tmp_path)
    assert build_module(UNIT, EMULATED, hip_root) == module


def test_a_compiler_that_is_too_old(monkeypatch):
    monkeypatch.setattr(toolchain, "_say", lambda command: "g++ (Debian 8.3.0-6) 8.3.0")
    with pytest.raises(UnsupportedConfig, match=r"g\+\+ 9 and later"):
        toolchain.find_module_compiler(EMULATED)


def test_sources_that_do_not_compile(hip_root):
    (hip_root / "src/store_binding.h").write_text("#error broken here")
    with pytest.raises(CompileFailed, match="broken here"):
        build_module(UNIT, EMULATED, hip_root)
    assert not list(module_folder(UNIT, EMULATED, hip_root).glob("*.so"))


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "gfx90a", "gfx936", "sm_80", "sm_90"])
def test_device_code(hip_root, name):
    (kernel,) = compile_device(UNIT, Target(name), hip_root).kernels
    assert kernel.name == "copy_row"
    assert kernel.vector_registers > 0
    assert (kernel.shared_nbytes, kernel.spills, kernel.stack_nbytes) == (512, 0, 0)
    assert ("global_load_dword" if name.startswith("gfx") else "LDG.E") in kernel.assembly


def test_spills_and_stack_are_read():
    log = (
        "ptxas info    : Compiling entry function '_Z1fv' for 'sm_90a'\n"
        "ptxas info    : Function properties for _Z1fv\n"
        "    96 bytes stack frame, 84 bytes spill stores, 80 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem, 96 bytes cumulative stack size\n"
    )
    (kernel,) = device_code.cuda_kernels(log)
    assert kernel == device_code.Kernel("f", 255, 1024, spills=84, stack_nbytes=96)


# ---- the command ----------------------------------------------------------------------------------


@pytest.fixture
def small(hip_root, monkeypatch):
    """The command, on the small hip/."""
    monkeypatch.setattr(command, "build_module", lambda unit, target: build_module(unit, target, hip_root))
    monkeypatch.setattr(command, "compile_device", lambda unit, target: compile_device(unit, target, hip_root))
    return lambda *flags: command.main(["--phase", "store", "--recipe", "int8", "--head-dim", "128", *flags])


def test_help_is_fast_and_needs_no_torch():
    program = (
        "import sys; from sglang_quantkv.build import main\n"
        "try: main(['--help'])\n"
        "finally: print('torch' in sys.modules, 'tvm_ffi' in sys.modules)"
    )
    start = time.monotonic()
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert time.monotonic() - start < 5
    for flag in ("--target", "--recipe", "--head-dim", "--page-size", "--phase", "--jobs", "gfx942", "sm_80", "k8v4"):
        assert flag in out
    assert out.endswith("False False\n")


def test_command_builds_modules(small, capsys):
    assert small("--target", "emulated_mma,emulated_mmac", "--page-size", "32,64", "--jobs", "2") == 0
    out = capsys.readouterr().out
    assert "[4/4] store_int8_d128_p" in out
    assert "emulated_mmac: 2 modules in " in out


def test_command_shows_device_code(small, capsys, monkeypatch):
    monkeypatch.setattr(toolchain, "_hipccs", lambda: iter(()))
    assert small("--target", "gfx942,gfx936") == 0
    out = capsys.readouterr().out
    assert "gfx942: 1 units, device code compiled, not run" in out
    assert "gfx936: 1 units as text" in out
    assert "copy_row" in out


def test_command_builds_cuda_without_a_gpu(small, hip_root, capsys):
    binding = hip_root / "src/store_binding.h"
    text = binding.read_text().replace(
        "#define QUANTKV_BIND_STORE(...)",
        '#include "src/store.h"\n#define QUANTKV_BIND_STORE(...) QUANTKV_INSTANTIATE_STORE(__VA_ARGS__)',
    )
    binding.write_text(text)
    assert small("--target", "sm_90") == 0
    out = capsys.readouterr().out
    assert "sm_90: 1 modules in " in out
    assert "copy_row" in out


def test_command_lists_what_failed(small, hip_root, capsys):
    (hip_root / "src/store.h").write_text("#error broken here")
    assert small("--target", "gfx942,emulated_mma") == 1
    captured = capsys.readouterr()
    assert "broken here" in captured.err
    assert "1 of 2 failed: store_int8_d128_p64 gfx942" in captured.err
    assert "emulated_mma: 1 modules" in captured.out


@pytest.mark.parametrize(
    "flags",
    [
        ("--target", "gfx900"),
        ("--head-dim", "96"),
        ("--page-size", "16"),
        ("--recipe", "bf16"),
        ("--phase", "load"),
        ("--jobs", "0"),
    ],
)
def test_command_refuses(small, capsys, flags):
    assert small("--target", "emulated_mma", *flags) == 2
    assert flags[1] in capsys.readouterr().err
