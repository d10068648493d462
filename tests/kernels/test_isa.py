"""What the CPU really runs: probes that come back, die, hang or never start, and the limit that oneDNN is given."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import sys

import pytest

from quire.kernels import isa
from quire.kernels.isa import AMX, CPU, AMXState

pytestmark = pytest.mark.core

x86_linux = pytest.mark.skipif(
    not (sys.platform == "linux" and platform.machine() == "x86_64"), reason="machine code of x86-64 Linux"
)
ALL_AMX = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
UNDEFINED = bytes.fromhex("0f0b")
ENDLESS = bytes.fromhex("ebfe")


def advertised_flags() -> frozenset[str]:
    return isa.read_cpu(probe=lambda flags: AMXState(AMX.ABSENT, "")).flags


def make_cpu(*flags: str, status: AMX = AMX.FAULTS) -> CPU:
    return CPU(vendor="v", model="m", cores=1, flags=frozenset(flags), amx=AMXState(status, ""))


@x86_linux
class TestProbe:
    def test_code_that_returns_runs(self):
        assert isa.run_code(isa.RETURN, ask_for_tiles=False).status is AMX.RUNS

    def test_undefined_instruction_is_a_fault_that_names_its_signal(self):
        state = isa.run_code(UNDEFINED, ask_for_tiles=False)
        assert state.status is AMX.FAULTS
        assert "SIGILL" in state.detail

    @pytest.mark.skipif("amx_tile" in advertised_flags(), reason="this CPU may really have AMX")
    def test_tile_code_on_a_cpu_without_it_is_a_fault_that_names_its_signal(self):
        state = isa.run_code(isa.tile_code(ALL_AMX), ask_for_tiles=False)
        assert state == AMXState(AMX.FAULTS, "a tile instruction died with SIGILL")

    @pytest.mark.skipif("amx_tile" in advertised_flags(), reason="this CPU may really have AMX")
    def test_advertised_without_being_there_is_a_fault(self):
        assert isa.probe_amx(ALL_AMX).status is AMX.FAULTS

    @pytest.mark.skipif("amx_tile" not in advertised_flags(), reason="this CPU does not advertise AMX")
    def test_advertised_amx_is_judged_one_way_or_the_other(self):
        assert isa.probe_amx(advertised_flags()).status is not AMX.ABSENT

    def test_hanging_child_is_given_up(self):
        state = isa.run_code(ENDLESS, ask_for_tiles=False, timeout_s=0.3)
        assert state.status is AMX.FAULTS
        assert "0.3 s" in state.detail

    def test_code_may_read_the_tile_configuration(self):
        """mov al, [rdi]; cmp al, 1 (the palette); je +2; ud2; ret"""
        assert isa.run_code(bytes.fromhex("8a073c0174020f0bc3"), ask_for_tiles=False).status is AMX.RUNS


def test_child_that_cannot_start_is_a_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    state = isa.run_code(isa.RETURN)
    assert state.status is AMX.FAULTS
    assert "could not start" in state.detail


@pytest.mark.parametrize(
    ("status", "stderr", "detail"),
    [
        (-4, "", "a tile instruction died with SIGILL"),
        (-11, "", "a tile instruction died with SIGSEGV"),
        (isa.REFUSED_STATUS, "", "the kernel refuses the tile registers to this process"),
        (
            1,
            "Traceback\nPermissionError: no executable pages\n",
            "the probe failed: PermissionError: no executable pages",
        ),
        (9, "", "the probe failed: exit status 9"),
    ],
)
def test_judge_keeps_the_reason(status, stderr, detail):
    assert isa.probe_result(status, stderr) == AMXState(AMX.FAULTS, detail)


def test_no_child_is_started_where_nothing_is_advertised(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started a child"))
    assert isa.probe_amx(frozenset({"avx512f"})).status is AMX.ABSENT


def test_tile_code_uses_only_what_is_advertised():
    assert isa.DOT_BF16 not in isa.tile_code(frozenset({"amx_tile", "amx_int8"}))
    assert isa.DOT_INT8 in isa.tile_code(frozenset({"amx_tile", "amx_int8"}))
    assert len(isa.TILE_CONFIG) == 64


class TestReadCPU:
    X86 = (
        "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Big Iron\nflags\t\t: fpu avx2 amx_tile amx_int8\n\n"
        "processor\t: 1\nmodel name\t: Other\nflags\t\t: avx512f\n"
    )

    @pytest.fixture(autouse=True)
    def on_x86(self, monkeypatch):
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    def read(self, tmp_path, text):
        path = tmp_path / "cpuinfo"
        path.write_text(text)
        return isa.read_cpu(path, probe=lambda flags: AMXState(AMX.RUNS, " ".join(sorted(flags))))

    def test_first_processor_is_described(self, tmp_path):
        cpu = self.read(tmp_path, self.X86)
        assert (cpu.vendor, cpu.model) == ("GenuineIntel", "Big Iron")
        assert cpu.flags == {"avx2", "amx_tile", "amx_int8"}
        assert cpu.amx.detail == "amx_int8 amx_tile avx2"

    @pytest.mark.parametrize("machine", isa.ARM)
    def test_other_architecture_has_no_amx(self, tmp_path, monkeypatch, machine):
        """Its flags are its own, even where an emulator shows an x86 host's cpuinfo."""
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(isa, "arm_flags", lambda: {"asimd", "asimddp"})
        path = tmp_path / "cpuinfo"
        path.write_text(self.X86)
        cpu = isa.read_cpu(path)
        assert cpu.flags == {"asimd", "asimddp"}
        assert cpu.model
        assert cpu.amx.status is AMX.ABSENT

    def test_other_system_has_no_cpuinfo(self, tmp_path):
        cpu = isa.read_cpu(tmp_path / "missing")
        assert cpu.cores >= 1
        assert cpu.amx.status is AMX.ABSENT


class TestArmFlags:
    def read(self, tmp_path, *entries):
        path = tmp_path / "auxv"
        path.write_bytes(b"".join(struct.pack("NN", *entry) for entry in (*entries, (0, 0))))
        return isa.arm_flags(path)

    @pytest.mark.parametrize(
        ("hwcap", "hwcap2", "flags"),
        [
            (0x119FFF & ~(1 << 20), 0, {"asimd"}),
            (0x119FFF, 0, {"asimd", "asimddp"}),
            (0x119FFF, 1 << 13, {"asimd", "asimddp", "i8mm"}),
            (0, 0, set()),
        ],
    )
    def test_linux_states_them_in_the_auxiliary_vector(self, tmp_path, monkeypatch, hwcap, hwcap2, flags):
        monkeypatch.setattr(sys, "platform", "linux")
        assert self.read(tmp_path, (6, 4096), (16, hwcap), (26, hwcap2)) == flags
        assert isa.arm_flags(tmp_path / "missing") == set()

    @pytest.mark.parametrize(("answer", "i8mm"), [("1\n", True), ("0\n", False), ("", False)])
    def test_macos_is_asked_for_i8mm_only(self, monkeypatch, answer, i8mm):
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, answer))
        assert isa.arm_flags() == {"asimd", "asimddp"} | ({"i8mm"} if i8mm else set())

    def test_a_system_that_cannot_be_asked_has_no_i8mm(self, monkeypatch):
        def fail(*_, **__):
            raise FileNotFoundError("no sysctl")

        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(subprocess, "run", fail)
        assert isa.arm_flags() == {"asimd", "asimddp"}


class TestCores:
    def make_group(self, tmp_path, path, quota, membership):
        folder = tmp_path / "cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(quota)
        (tmp_path / "self").write_text(membership)
        return isa.usable_cores(tmp_path / "cgroup", tmp_path / "self")

    @pytest.fixture(autouse=True)
    def eight_allowed(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)

    def test_affinity_without_control_groups(self, tmp_path):
        assert isa.usable_cores(tmp_path, tmp_path / "missing") == 8

    @pytest.mark.parametrize(
        ("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("broken", 8)]
    )
    def test_quota_of_the_root(self, tmp_path, quota, cores):
        assert self.make_group(tmp_path, "", quota, "0::/\n") == cores

    def test_the_tightest_group_above_counts(self, tmp_path):
        self.make_group(tmp_path, "pod", "300000 100000", "")
        assert self.make_group(tmp_path, "pod/job", "max 100000", "1:cpu:/x\n0::/pod/job\n") == 3


class TestOneDNN:
    @pytest.mark.parametrize(
        ("flags", "name"),
        [
            (["avx512_fp16", "avx512_bf16", "avx512_vnni", "avx512f"], "AVX512_CORE_FP16"),
            (["avx512_bf16", "avx512_vnni", "avx512f"], "AVX512_CORE_BF16"),
            (["avx512_vnni", "avx512f"], "AVX512_CORE_VNNI"),
            (["avx512f"], "AVX512_CORE"),
            (["avx2"], "AVX2"),
        ],
    )
    def test_limit_is_the_best_below_amx(self, flags, name):
        assert isa.onednn_limit(make_cpu(*flags)) == name

    @pytest.mark.parametrize("status", [AMX.ABSENT, AMX.RUNS])
    def test_no_limit_where_nothing_faults(self, status):
        assert isa.onednn_limit(make_cpu("avx512_fp16", status=status)) is None


class TestPrepare:
    @pytest.fixture(autouse=True)
    def clean(self, monkeypatch):
        for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
            monkeypatch.setenv(name, "")  # so that what `prepare` writes is undone after the test
        isa.prepare.cache_clear()
        yield
        isa.prepare.cache_clear()

    def prepare_on(self, monkeypatch, cpu):
        monkeypatch.setattr(isa, "read_cpu", lambda: cpu)
        return isa.prepare()

    def test_faulting_amx_limits_onednn(self, monkeypatch):
        cpu = make_cpu("avx512_bf16")
        assert self.prepare_on(monkeypatch, cpu) is cpu
        assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"

    @pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
    def test_a_limit_the_user_set_stands(self, monkeypatch, name):
        monkeypatch.setenv(name, "AVX2")
        self.prepare_on(monkeypatch, make_cpu("avx512_bf16"))
        assert os.environ[name] == "AVX2"
        assert os.environ["ONEDNN_MAX_CPU_ISA"] in ("", "AVX2")

    def test_working_amx_sets_nothing(self, monkeypatch):
        self.prepare_on(monkeypatch, make_cpu("avx512_bf16", status=AMX.RUNS))
        assert os.environ["ONEDNN_MAX_CPU_ISA"] == ""

    def test_the_cpu_is_read_once(self, monkeypatch):
        first = self.prepare_on(monkeypatch, make_cpu())
        assert self.prepare_on(monkeypatch, make_cpu("avx2")) is first
