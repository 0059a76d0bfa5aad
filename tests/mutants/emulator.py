"""Emulators that let through what hardware refuses, or forget what a program did."""

from tests.mutants import Mutant

_MEMORY = ("tests/emulator/test_reject_memory.py", "tests/emulator/test_reject_control.py")
_CORES = ("tests/emulator/test_cores.py",)

MUTANTS = [
    Mutant(
        "a slice past the end is clipped",
        "reference/emulator/views.py",
        "if step < 1 or not 0 <= start < stop <= size:",
        "stop = min(stop, size)\n        if step < 1 or not 0 <= start < stop <= size:",
        ("tests/emulator/test_views.py", *_MEMORY),
    ),
    Mutant(
        "capacity forgets that loops keep their tensors",
        "reference/emulator/capacity.py",
        "first, last = call.loop.first, call.loop.last - 1",
        "pass",
        ("tests/emulator/test_capacity.py",),
    ),
    Mutant(
        "psum state is not carried into later iterations",
        "reference/emulator/initialisation.py",
        "if loop.static_trips != 1 and psum_before:",
        "if False:",
        _MEMORY,
    ),
    Mutant(
        "a loop is taken to run at least once",
        "reference/emulator/initialisation.py",
        "if not loop.static_trips:",
        "if False:",
        _MEMORY,
    ),
    Mutant(
        "scatters to one row twice pass",
        "reference/emulator/dynamic.py",
        "if (counts > 1).any():",
        "if False:",
        _MEMORY,
    ),
    Mutant(
        "a barrier on any tensor orders all",
        "reference/emulator/races.py",
        "barriers[call.data.storage] = barriers.get(call.data.storage, 0) + 1",
        "barriers = dict.fromkeys(found, meetings)",
        _CORES,
    ),
    Mutant(
        "the end of an iteration never meets the next one's start",
        "reference/emulator/races.py",
        "range(2 if twice else 1)",
        "range(1)",
        _CORES,
    ),
    Mutant(
        "cores may differ in what they write to the same bytes",
        "reference/emulator/races.py",
        "if (both & (self.values[0] != self.values[1])).any():",
        "if False:",
        _CORES,
    ),
    Mutant(
        "a core may read what the other writes at run-time addresses",
        "reference/emulator/races.py",
        "if (self.written & self.read[::-1]).any():",
        "if False:",
        ("tests/emulator/test_interleavings.py",),
    ),
    Mutant(
        "a core may read back what both write over and over",
        "reference/emulator/races.py",
        "if (both & self.read_back.any(axis=0) & self.changed.any(axis=0)).any():",
        "if False:",
        ("tests/emulator/test_interleavings.py",),
    ),
    Mutant(
        "a core's own write hides the other's from its reads",
        "reference/emulator/races.py",
        "if access.write or not (common & ~own.region(access.tensor)).any():",
        "if True:",
        _CORES,
    ),
    Mutant(
        "reading one index tile counts as waiting",
        "reference/emulator/hazards.py",
        "self.read[key] = self.read.get(key, 0) | behind",
        "self.written[key] = self.written.get(key, 0) | behind",
        _MEMORY,
    ),
    Mutant(
        "programs are cached by shape alone",
        "reference/emulator/launch.py",
        'return ("array", tuple(value.shape), _dtype_of(value))',
        'return ("array", tuple(value.shape))',
        ("tests/emulator/test_program.py",),
    ),
    Mutant(
        "results of a run share memory with the next",
        "reference/emulator/run.py",
        "results[storage] = np.empty(storage.shape, storage.dtype.np)",
        "results[storage] = vars(self).setdefault(storage.name, np.empty(storage.shape, storage.dtype.np))",
        ("tests/emulator/test_program.py",),
    ),
]
