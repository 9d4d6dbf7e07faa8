"""The pipeline's schedule, its workers, and that nothing of them stays behind."""

from __future__ import annotations

import contextvars
import copy
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from pipeline_compare import ends, threads_end
from torch import nn

from intarsia.pipeline import GPipe
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.pipeline import Pipeline, clock_cycles
from intarsia.pipeline.gpipe.worker import StageThreads, shared_cores


def test_clock_cycles():
    assert list(clock_cycles(1, 1)) == [[(0, 0)]]
    assert list(clock_cycles(1, 3)) == [[(0, 0)], [(0, 1)], [(0, 2)]]
    assert list(clock_cycles(3, 1)) == [[(0, 0)], [(1, 0)], [(2, 0)]]
    assert list(clock_cycles(3, 3)) == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1), (0, 2)],
        [(2, 1), (1, 2)],
        [(2, 2)],
    ]
    assert list(clock_cycles(4, 2)) == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1)],
        [(3, 0), (2, 1)],
        [(3, 1)],
    ]


IN_STEP = [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (3, 0), (2, 1), (4, 0), (3, 1), (4, 1)]


@pytest.mark.parametrize(
    ("enabled", "needed", "want"),
    [
        (False, True, IN_STEP),
        (True, False, IN_STEP),  # nothing to train: autograd keeps nothing
        # Outputs are kept for the backward pass anyway; the last one still waits.
        (True, True, [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (4, 0), (3, 1), (4, 1)]),
    ],
)
def test_a_stage_runs_away_from_the_next_only_where_its_outputs_are_kept(enabled, needed, want):
    timeline = []

    class Log(nn.Module):
        def __init__(self, stage):
            super().__init__()
            self.stage, self.count = stage, 0

        def forward(self, x):
            now = (self.count, self.stage)
            if self.stage:  # slower than the first stage, on a busy machine too
                assert ends(lambda: timeline == want[: want.index(now)], limit_s=20), timeline
                time.sleep(0.1)
            timeline.append(now)
            self.count += 1
            return x

    model = GPipe(nn.Sequential(Log(0), Log(1)), [1, 1], devices=["cpu"] * 2, chunks=5)
    with torch.set_grad_enabled(enabled):
        model(torch.rand(5, 1, requires_grad=needed))
    assert timeline == want


def test_stages_run_at_the_same_time_each_on_its_thread():
    meeting = threading.Barrier(2, timeout=20)
    threads = [set(), set()]

    class Meet(nn.Module):
        def __init__(self, stage):
            super().__init__()
            self.stage, self.count = stage, 0

        def forward(self, x):
            threads[self.stage].add(threading.current_thread().name)
            # Micro-batch i+1 in the first stage meets micro-batch i in the second.
            if (self.stage, self.count) not in ((0, 0), (1, 3)):
                meeting.wait()
            self.count += 1
            return x

    GPipe(nn.Sequential(Meet(0), Meet(1)), [1, 1], devices=["cpu"] * 2, chunks=4)(torch.rand(4))
    assert threads == [{"stage 0_0"}, {"stage 1_0"}]


def test_context_variables_follow():
    variable = contextvars.ContextVar("variable", default="unset")
    seen = []

    class See(nn.Module):
        def forward(self, x):
            seen.append(variable.get())
            return x

    variable.set("set")
    GPipe(nn.Sequential(See(), See()), [1, 1], devices=["cpu"] * 2, chunks=2)(torch.rand(2))
    assert seen == ["set"] * 4


@pytest.fixture
def interruptible():
    """Interrupts are heard: a job that a shell starts in the background ignores them."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_the_caller_ends_the_workers():
    before = threading.active_count()

    class Interrupt(nn.Module):
        def forward(self, x):
            os.kill(os.getpid(), signal.SIGINT)  # arrives on the main thread, which waits for results
            time.sleep(0.2)
            return x

    model = GPipe(nn.Sequential(nn.Identity(), Interrupt()), [1, 1], devices=["cpu"] * 2, chunks=2)
    with pytest.raises(KeyboardInterrupt):
        model(torch.rand(2))
    del model
    assert threads_end(before)


@pytest.mark.parametrize("fail", [False, True])
def test_nothing_stays_alive(fail):
    class Last(nn.Module):
        def forward(self, x):
            if fail:
                raise ZeroDivisionError
            return x * 2

    model = GPipe(nn.Sequential(nn.Linear(4, 4), Last()), [1, 1], devices=["cpu"] * 2, chunks=2)

    def run():
        x = torch.rand(4, 4, requires_grad=True)
        alive = weakref.ref(x)
        if fail:
            with pytest.raises(ZeroDivisionError):
                model(x)
        else:
            model(x).sum().backward()
        return alive

    alive = run()
    assert ends(lambda: alive() is None, limit_s=5)


@pytest.mark.parametrize("where", ["_fence", "_finish"])
def test_a_failure_between_tasks_reaches_the_caller(where, monkeypatch):
    before, original = threading.active_count(), getattr(Pipeline, where)

    def fail(self, *args):
        if args[:2] in ((1, 1), (2, 0)):
            raise ZeroDivisionError
        return original(self, *args)

    monkeypatch.setattr(Pipeline, where, fail)
    model = GPipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], devices=["cpu"] * 2, chunks=4)
    with pytest.raises(ZeroDivisionError):
        model(torch.rand(4))
    monkeypatch.undo()
    assert torch.equal(model(torch.ones(4)), torch.ones(4))  # the threads are still good
    del model
    assert threads_end(before)


def test_a_stage_keeps_its_thread_from_step_to_step_and_a_copy_has_its_own():
    seen = []

    class See(nn.Module):
        def forward(self, x):
            seen.append(threading.get_ident())
            return x * 1

    model = GPipe(nn.Sequential(See(), nn.Identity()), [1, 1], devices=["cpu"] * 2, chunks=2)
    for _ in range(3):
        model(torch.rand(2, 1))
    assert len(set(seen)) == 1
    copy.deepcopy(model)(torch.rand(2, 1))
    assert len(set(seen)) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_threads_are_made_anew_after_a_fork():
    threads = StageThreads(1)
    assert threads.submit(0, os.getpid).result() == os.getpid()
    child = os.fork()
    if child == 0:
        os._exit(0 if threads.submit(0, os.getpid).result(timeout=20) == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_cores_are_shared_and_given_back():
    before = torch.get_num_threads()
    seen = []

    class See(nn.Module):
        def forward(self, x):
            seen.append(torch.get_num_threads())
            return x

    try:
        torch.set_num_threads(5)
        GPipe(nn.Sequential(See(), See()), [1, 1], devices=["cpu"] * 2, chunks=2)(torch.rand(2))
        assert seen == [2] * 4
        assert torch.get_num_threads() == 5
        with shared_cores([torch.device("meta")]) as prepare:
            prepare()
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)


def test_pipeline_alone():
    batches = [Batch(torch.full((1,), float(i))) for i in range(5)]
    stages = [
        nn.Sequential(nn.Linear(1, 1)),
        nn.Sequential(nn.Linear(1, 1), nn.Tanh()),
        nn.Sequential(nn.ReLU()),
    ]
    expected = []
    for batch in batches:
        x = batch.tensor
        for stage in stages:
            x = stage(x)
        expected.append(x)
    Pipeline(batches, stages, checkpoint_stop=3).run()
    assert [batch.tensor for batch in batches] == expected


def test_a_first_run_does_not_import_the_compiler():
    program = """
import sys, torch
from torch import nn
from intarsia.pipeline.gpipe.gpipe import GPipe
had = "torch._dynamo" in sys.modules
layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2), nn.Dropout())
GPipe(layers, [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint="always")(torch.rand(4, 2)).sum().backward()
assert had or "torch._dynamo" not in sys.modules, "seconds of the first run"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)
