"""What links and matrix units do: rates that turn a plan's bytes and operations into time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """How devices are joined, and how fast they multiply."""

    name: str
    bandwidth: float  # bytes a second that a device receives
    latency: float  # seconds a hop of a collective
    peak: float  # operations a second of a device, bfloat16 products
    reached: float = 1.0  # the part of the bandwidth that large collectives were seen to have
    start: float = 0.0  # seconds before a collective's first hop

    @property
    def rate(self) -> float:
        """Bytes a second in a large collective."""
        return self.bandwidth * self.reached


# Published rates: NVLink 4 is 450 GB/s a direction and GPU, PCIe 5 x16 is 64, NDR InfiniBand 50.
# Of the matrix peak (989 TFLOP/s dense) large products reach about 800. Latencies are of the order
# that collective libraries document for a hop. What NVLink reached, and how long a collective takes
# to start, are of NCCL between two H200, NVLink multicast off ("Several GPUs" in docs/measured.md);
# the other links were not measured. These three are used in predicted times, never in a choice.
LINKS = {
    link.name: link
    for link in (
        Link("nvlink4", 450e9, 1e-6, 800e12, reached=0.58, start=4e-6),
        Link("pcie5", 64e9, 3e-6, 800e12),
        Link("infiniband-ndr", 50e9, 5e-6, 800e12),
    )
}
DEFAULT = LINKS["nvlink4"]
