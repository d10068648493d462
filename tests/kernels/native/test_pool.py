"""The thread pool of the C++ kernels, through `team_sum`: a job whose answer is right only if barriers hold.

Whatever forks, dies or is interrupted does so in a child process, which has to end by itself.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

native = pytest.importorskip("quire.kernels.cpu._native", reason="the C++ kernels are not built")

pytestmark = pytest.mark.cpu

TIMEOUT_S = 120.0

# What every script starts with. `check` raises if a thread missed what another one wrote.
PRELUDE = """
import os, signal, sys, threading, time
from quire.kernels.cpu._native import team_sum

def check(threads, rounds):
    numbers = threads * rounds
    assert team_sum(threads, rounds) == threads * numbers * (numbers - 1) // 2

def fork_and_check(threads, rounds):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            check(threads, rounds)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def workers():
    tasks = [f"/proc/self/task/{task}" for task in os.listdir("/proc/self/task")]
    names = {open(f"{task}/comm").read().strip(): task for task in tasks}
    return {name: task for name, task in names.items() if name.startswith("quire-")}
"""


def expected_sum(threads, rounds):
    numbers = threads * rounds
    return threads * numbers * (numbers - 1) // 2


def run_script(script, **options):
    # Newer Pythons warn of every fork with threads; that it works all the same is what is tested here.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, **options)


def assert_passes(script):
    child = run_script(script)
    assert (child.returncode, child.stdout, child.stderr) == (0, "done\n", "")


class TestTeams:
    @pytest.mark.parametrize("threads", [1, 2, 3, 8])
    @pytest.mark.parametrize("rounds", [0, 1, 7, 1000])
    def test_every_thread_sees_what_the_others_wrote(self, threads, rounds):
        assert native.team_sum(threads, rounds) == expected_sum(threads, rounds)

    def test_teams_of_different_sizes_follow_each_other(self):
        sizes = [2, 5, 1, 3, 2, 8, 2, 1, 4] * 30
        assert [native.team_sum(size, 3) for size in sizes] == [expected_sum(size, 3) for size in sizes]

    def test_many_short_jobs(self):
        assert {native.team_sum(2, 1) for _ in range(5000)} == {expected_sum(2, 1)}

    def test_callers_take_turns(self):
        sizes = [2, 3, 1, 4] * 25
        with ThreadPoolExecutor(4) as executor:
            sums = list(executor.map(lambda size: native.team_sum(size, 20), sizes))
        assert sums == [expected_sum(size, 20) for size in sizes]

    @pytest.mark.parametrize("threads", [0, -1])
    def test_a_team_without_threads_is_refused(self, threads):
        with pytest.raises(ValueError, match=f"at least 1 thread, not {threads}"):
            native.team_sum(threads, 1)


class TestWorkers:
    def test_they_start_when_needed_and_have_names(self):
        assert_passes("""
assert workers() == {}
check(1, 10)
assert workers() == {}, "one thread needs no worker"
check(3, 10)
assert sorted(workers()) == ["quire-1", "quire-2"]
check(2, 10)
check(4, 10)
assert sorted(workers()) == ["quire-1", "quire-2", "quire-3"]
print("done")
""")

    def test_they_sleep_when_there_is_nothing_to_do_and_wake_again(self):
        assert_passes("""
def asleep():
    return all(open(f"{task}/stat").read().rpartition(")")[2].split()[0] == "S" for task in workers().values())

for _ in range(3):
    check(3, 10)
    while not asleep():
        time.sleep(0.001)
print("done")
""")

    def test_they_take_no_signals(self):
        assert_passes("""
check(3, 10)
for task in workers().values():
    lines = open(f"{task}/status").read().splitlines()
    blocked = int(next(line for line in lines if line.startswith("SigBlk:")).split()[1], 16)
    assert all(blocked >> number - 1 & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)), hex(blocked)
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set(), "the caller's own mask must be as before"
print("done")
""")

    def test_an_interrupt_reaches_the_main_thread(self):
        assert_passes("""
check(2, 10)
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        check(2, 100)
except KeyboardInterrupt:
    check(2, 100)
    print("done")
""")

    def test_a_thread_that_the_system_refuses_is_an_error(self):
        assert_passes("""
import resource
check(2, 10)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
try:
    team_sum(1000, 1)
except RuntimeError as error:
    assert "could not be started" in str(error), error
    check(2, 10)
    print("done")
""")


class TestFork:
    def test_before_the_pool_has_run(self):
        assert_passes("fork_and_check(3, 100)\ncheck(3, 100)\nprint('done')")

    def test_after_the_pool_has_run(self):
        assert_passes("check(3, 100)\nfork_and_check(3, 100)\nfork_and_check(4, 100)\ncheck(3, 100)\nprint('done')")

    def test_while_another_thread_is_in_a_job(self):
        assert_passes("""
stop = False

def keep_busy():
    while not stop:
        check(2, 2000)

thread = threading.Thread(target=keep_busy)
thread.start()
for _ in range(20):
    fork_and_check(2, 100)
stop = True
thread.join()
print("done")
""")

    def test_of_a_fork(self):
        assert_passes("""
check(2, 10)
child = os.fork()
if child == 0:
    check(3, 10)
    fork_and_check(2, 10)
    check(3, 10)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("done")
""")


class TestExit:
    def test_while_workers_spin(self):
        assert_passes("check(4, 10)\nprint('done')")

    def test_while_workers_sleep(self):
        assert_passes("check(4, 10)\ntime.sleep(0.05)\nprint('done')")

    def test_while_a_daemon_thread_is_in_a_job(self):
        assert_passes("""
def keep_busy():
    while True:
        team_sum(2, 1000)

threading.Thread(target=keep_busy, daemon=True).start()
time.sleep(0.02)
print("done")
""")

    def test_of_a_forked_child_that_ran_a_team(self):
        assert_passes("""
check(2, 10)
child = os.fork()
if child == 0:
    check(2, 10)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print("done")
""")
