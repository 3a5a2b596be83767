"""Record a few training steps of whatever program this Python runs, under torch's profiler.

`ebbtide trace --record` puts this folder on the PYTHONPATH of the command that it starts, so that
Python runs this file before the program. It must not need ebbtide: the program may run in another
environment. Nothing is imported until the program itself imports torch's optimizers; a step ends
when the first of them has stepped. It writes to the folder that the variable names:

    python, torch   empty: Python ran, torch's optimizers were imported
    began           empty: a process has begun to count steps, and no other will
    FILE            the recording, under the name that is asked for
    status.json     how many steps were counted and recorded, and what went wrong

What goes wrong here must not stop the program: it is noted, and the program runs on.
"""

import atexit
import contextlib
import importlib.machinery
import json
import os
import sys
import weakref
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, Final

VARIABLE: Final = "EBBTIDE_RECORD"
"""A JSON object: `folder`, `file`, `skip` and `steps`."""

OPTIMIZER: Final = "torch.optim.optimizer"

_HERE = os.path.dirname(os.path.abspath(__file__))


class Recorder:
    """Counts the steps of one optimizer, and records some of them.

    Args:
        folder: Where files are written.
        file: The name of the recording there; torch compresses it where that ends in `.gz`.
        num_skipped: Steps before the recorded ones, 2 or more. The profiler warms up in the last.
        num_steps: Steps to record.
    """

    def __init__(self, folder: str, file: str, num_skipped: int, num_steps: int) -> None:
        self._folder = folder
        self._file = file
        self._num_skipped = num_skipped
        self._num_steps = num_steps
        self._num_counted = 0
        self._num_recorded = 0
        self._owner = 0
        self._optimizer: Any = None
        self._handle: Any = None
        self._profiler: Any = None
        self._is_wanted = True
        self._error = ""

    def watch(self, module: ModuleType) -> None:
        """Be called after each step of any optimizer; `module` is torch's of optimizers."""
        self.note("torch")
        self._handle = module.register_optimizer_step_post_hook(self._end_step)

    def note(self, name: str) -> None:
        """Make an empty file, if the folder is still there: a process may outlive it."""
        with (
            contextlib.suppress(OSError),
            open(os.path.join(self._folder, name), "w", encoding="utf-8"),
        ):
            pass

    def _end_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # Whatever this raised would end the training, which is worth more than its trace.
        try:
            self._count(optimizer)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
            self.end()
            self._take_off()

    def _count(self, optimizer: Any) -> None:
        if self._owner not in (0, os.getpid()) or (self._owner == 0 and not self._claim()):
            self._take_off()
            return
        known = None if self._optimizer is None else self._optimizer()
        if known is None:
            self._optimizer = weakref.ref(optimizer)
        elif known is not optimizer:
            return  # a model of two optimizers steps once for both
        self._num_counted += 1
        if self._num_counted == self._num_skipped - 1:
            self._start()
        elif self._profiler is not None:
            if self._num_counted > self._num_skipped:
                self._num_recorded += 1
            # At the end of the last one it calls `_save`.
            self._profiler.step()
        if self._num_counted == self._num_skipped + self._num_steps:
            self.end()

    def _claim(self) -> bool:
        """Return whether this process is the one to record: rank 0, or the first without a rank."""
        distributed = sys.modules["torch"].distributed
        is_ranked = distributed.is_available() and distributed.is_initialized()
        rank = distributed.get_rank() if is_ranked else int(os.environ.get("RANK", "0"))
        if rank != 0:
            return False
        try:
            os.close(os.open(os.path.join(self._folder, "began"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        self._owner = os.getpid()
        atexit.register(self.end)
        return True

    def _start(self) -> None:
        torch: Any = sys.modules["torch"]
        # Two at once would leave the program's own without anything. The name is torch's private
        # one, so it may go.
        is_enabled = getattr(torch.autograd, "_profiler_enabled", None)
        if is_enabled is not None and is_enabled():
            raise RuntimeError("the program runs under a profiler of its own at that step")
        profiler: Any = importlib.import_module("torch.profiler")
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        self._profiler = profiler.profile(
            activities=activities,
            schedule=profiler.schedule(wait=0, warmup=1, active=self._num_steps, repeat=1),
            on_trace_ready=self._save,
            # Shapes and stacks slow the CPU down; memory is what offloading is for.
            profile_memory=True,
        )
        self._profiler.start()

    def _save(self, profiler: Any) -> None:
        if self._is_wanted:
            profiler.export_chrome_trace(os.path.join(self._folder, self._file))

    def end(self) -> None:
        """Stop, and write what was done; a second call does nothing."""
        if self._owner != os.getpid() or self._handle is None:
            return
        self._take_off()
        if self._profiler is not None:
            # Of a program that ended early the whole steps are kept, if there are any,
            # and the start of the next one.
            self._is_wanted = self._num_recorded > 0
            try:
                self._profiler.stop()
            except Exception as error:
                self._error = self._error or f"{type(error).__name__}: {error}"
            self._profiler = None
        status = {
            "num_counted": self._num_counted,
            "num_recorded": self._num_recorded,
            "error": self._error,
        }
        # Where the folder is gone, nobody waits for the answer.
        with (
            contextlib.suppress(OSError),
            open(os.path.join(self._folder, "status.json"), "w", encoding="utf-8") as file,
        ):
            json.dump(status, file)

    def _take_off(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class WatchingFinder:
    """Finds torch's module of optimizers as Python would, and is told when it has run."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import the module; None for all other ones."""
        if name != OPTIMIZER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._recorder.watch(module)

        loader.exec_module = exec_module
        return spec


def run_other(name: str, folders: Sequence[str]) -> None:
    """Run the module that Python would have run, were this one not there."""
    spec = importlib.machinery.PathFinder.find_spec(name, folders)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def install(settings: str) -> None:
    """Watch for torch's optimizers; `settings` is the value of the variable."""
    form = json.loads(settings)
    recorder = Recorder(form["folder"], form["file"], form["skip"], form["steps"])
    recorder.note("python")
    sys.meta_path.insert(0, WatchingFinder(recorder))


if __name__ == "sitecustomize":
    _settings = os.environ.get(VARIABLE)
    if _settings:
        install(_settings)
    run_other(__name__, [folder for folder in sys.path if os.path.abspath(folder) != _HERE])
