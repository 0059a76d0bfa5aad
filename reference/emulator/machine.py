"""What one physical NeuronCore-v3 of Trainium2 does in a second: one number, one source.

Sources, all of aws-neuron-sdk 2.32: T2 trainium2_arch.rst, T1 trainium_inferentia2_arch.rst, DGE nki-dge.rst,
DMA nki-dma-bandwidth-guide.rst and nki-dma-overview.rst, PERF nki_perf_guide.rst; OLD: the cost tables of the NKI beta.
A number that no source states for trn2 is marked unverified, and so is every printed figure that rests on it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

ENGINES = ("tensor", "vector", "scalar", "gpsimd")


class Number(float):
    """A float that knows its unit, its source, and whether hardware documentation states it."""

    unit: str
    source: str
    unverified: bool

    def __new__(cls, value: float, unit: str, source: str, unverified: bool = False) -> Number:
        number = super().__new__(cls, value)
        number.unit, number.source, number.unverified = unit, source, unverified
        return number


@dataclass(frozen=True)
class Machine:
    """Rates and overheads of one physical core; LNC 2 is two of them."""

    name: str
    tensor_clock: Number
    vector_clock: Number
    scalar_clock: Number
    gpsimd_clock: Number
    issue_cycles: Number
    access_cycles: Number
    accumulator_read_cycles: Number
    gpsimd_cycles: Number
    dynamic_address_cycles: Number
    semaphore_seconds: Number
    activation_table_seconds: Number
    hbm_bandwidth: Number
    dma_engines: Number
    dma_engine_bandwidth: Number
    dma_engine_partitions: Number
    dma_start_seconds: Number
    dma_completion_seconds: Number
    hwdge_seconds: Number
    hwdge_units: Number
    swdge_seconds: Number
    swdge_row_seconds: Number
    transpose_from_hbm: Number
    transpose_from_sbuf: Number
    barrier_seconds: Number
    sendrecv_seconds: Number
    gpsimd_sendrecv_seconds: Number
    register_load_seconds: Number
    loop_seconds: Number
    descriptor_efficiency: tuple[tuple[int, Number], ...]
    sbuf_bytes: Number
    psum_banks: Number
    psum_bank_bytes: Number
    registers: Number

    def clock(self, engine: str) -> Number:
        """Cycles a second of `engine`, one of ENGINES."""
        return getattr(self, f"{engine}_clock")

    @property
    def dma_bandwidth(self) -> float:
        """Bytes a second of all DMA engines together, on long descriptors."""
        return self.dma_engines * self.dma_engine_bandwidth

    def efficiency(self, descriptor_bytes: float) -> float:
        """Share of the DMA bandwidth that descriptors of this size reach, linear between the table's points."""
        lower_bytes, lower = 0.0, 0.0
        for upper_bytes, upper in self.descriptor_efficiency:
            if descriptor_bytes < upper_bytes:
                return lower + (upper - lower) * (descriptor_bytes - lower_bytes) / (upper_bytes - lower_bytes)
            lower_bytes, lower = upper_bytes, upper
        return float(lower)

    def numbers(self) -> dict[str, Number]:
        """Every number by name, the points of the descriptor table included."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        named |= {f"descriptor_efficiency[{size} B]": share for size, share in self.descriptor_efficiency}
        return {name: value for name, value in named.items() if isinstance(value, Number)}


trn2 = Machine(
    name="trn2",
    tensor_clock=Number(2.4e9, "Hz", "T2"),
    vector_clock=Number(0.96e9, "Hz", "T2"),
    scalar_clock=Number(1.2e9, "Hz", "T2"),
    gpsimd_clock=Number(1.2e9, "Hz", "T2"),
    issue_cycles=Number(64, "cycles", "OLD: least time between two instructions of an engine"),
    access_cycles=Number(64, "cycles", "T1: about 60, latency of a read or write of SBUF or PSUM"),
    accumulator_read_cycles=Number(64, "cycles", "T1: ActReadAccumulator; taken for Vector too"),
    gpsimd_cycles=Number(
        150, "cycles", "OLD: what iota, affine_select and the gathers take before their first element"
    ),
    dynamic_address_cycles=Number(600, "cycles", "OLD: tensor_copy_dynamic"),
    semaphore_seconds=Number(
        40e-9, "s", "PERF gives 100 cycles for a dependent instruction, access included", unverified=True
    ),
    activation_table_seconds=Number(1.3e-6, "s", "profile in nki-dma-overview.rst", unverified=True),
    hbm_bandwidth=Number(362e9, "B/s", "T2: 2.9 TB/s a chip over 8 cores"),
    dma_engines=Number(16, "", "T2"),
    dma_engine_bandwidth=Number(23e9, "B/s", "DMA"),
    dma_engine_partitions=Number(8, "partitions", "DMA: an engine serves 8 partitions of a tile"),
    dma_start_seconds=Number(1.3e-6, "s", "DMA: semaphore to first byte"),
    dma_completion_seconds=Number(0.6e-6, "s", "DMA: a small transfer takes about 2 us in all", unverified=True),
    hwdge_seconds=Number(0.6e-6, "s", "T2, DGE: per instruction"),
    hwdge_units=Number(2, "", "T2: behind the Sync and the Scalar sequencer"),
    swdge_seconds=Number(1e-6, "s", "GpSimd writes the descriptors; no published figure", unverified=True),
    swdge_row_seconds=Number(10e-9, "s", "per gathered row; no published figure", unverified=True),
    transpose_from_hbm=Number(0.9, "of bandwidth", "T2"),
    transpose_from_sbuf=Number(0.5, "of bandwidth", "T2"),
    barrier_seconds=Number(2.5e-6, "s", "no published figure", unverified=True),
    sendrecv_seconds=Number(2.5e-6, "s", "no published figure", unverified=True),
    gpsimd_sendrecv_seconds=Number(1e-6, "s", "no published figure", unverified=True),
    register_load_seconds=Number(
        1.5e-6, "s", "a register read through memory is a synchronising round trip", unverified=True
    ),
    loop_seconds=Number(0.1e-6, "s", "test and branch of a runtime loop, per iteration", unverified=True),
    # Between two published figures for rows of 256 B: the curve of throughput, which holds the fixed costs that the
    # schedule counts apart, gives 0.10; the profile of one transfer (128 rows, 97 ns on each engine) gives 0.92.
    descriptor_efficiency=(
        (256, Number(1 / 3, "of bandwidth", "DMA: overhead-bound", unverified=True)),
        (512, Number(0.6, "of bandwidth", "DMA: below peak", unverified=True)),
        (2048, Number(0.9, "of bandwidth", "DMA: approaches peak", unverified=True)),
        (4096, Number(1.0, "of bandwidth", "DMA: saturates the engines")),
    ),
    sbuf_bytes=Number(212_984, "B/partition", "T2: 224 KiB less 16 KiB of DMA scratch and 8 B"),
    psum_banks=Number(8, "", "T1"),
    psum_bank_bytes=Number(2048, "B/partition", "T1"),
    registers=Number(64, "", "nisa.register_alloc: of each engine's sequencer"),
)
