"""The enumerations of nki.isa and nki.language, with the values of the documentation's stubs."""

from enum import Enum, IntEnum


class engine(Enum):
    """Engines of a NeuronCore."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(Enum):
    """What an instruction does to its engine's accumulator registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who generates the descriptors of a DMA."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What a dynamic access out of bounds does."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """Modes of the Tensor engine that trn2 has."""

    none = "none"
    double_row = "double_row"


class nc_version(IntEnum):
    """NeuronCore generations, which kernels compare by order; gen3 is trn2."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):
    """Who moves the data of a sendrecv."""

    dma = 1
    gpsimd_dma = 2


class MemoryRegion(Enum):
    """Where a tensor lives; `nl.hbm` is an alias of private_hbm."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"
