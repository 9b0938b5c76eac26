"""Published figures of GPUs, of one direction, and products in bfloat16 without sparsity.

Sources: NVIDIA's data sheets of each card (A10, A40, A100, H100, H200, L4, L40S, DGX B200, GB200,
RTX 6000 Ada, RTX PRO 6000) and the architecture papers of GeForce cards, whose products
accumulate in float32. A data sheet's figure with sparsity is halved, a link's sum of both
directions too. Cards without NVLink have PCIe's rate: of 32 and 64 GB/s of version 4 and 5 with 16
lanes a copy reaches about 25 and 50. Grace and its GPU share 450 GB/s (NVLink-C2C).
"""

import difflib
import re
from dataclasses import dataclass

from shardtune.errors import UserError

_PCIE_4, _PCIE_5 = 25e9, 50e9  # bytes/s
# A device with one of these words in its name is another than the published one.
_OTHER_DEVICES = {"mig", "laptop", "max", "d", "ti"}


@dataclass(frozen=True)
class Card:
    """A GPU."""

    name: str  # of `--gpu`
    memory_bytes: float
    flops_per_s: float
    bytes_per_s: float  # of its own memory
    link_bytes_per_s: float  # to another GPU of the node
    host_bytes_per_s: float  # to host memory


def _card(
    name: str, memory_gb: float, tflops: float, tb_per_s: float, pcie: float, link: float = 0
) -> Card:
    return Card(name, memory_gb * 1e9, tflops * 1e12, tb_per_s * 1e12, link * 1e9 or pcie, pcie)


_ALL = [
    _card("A10", 24, 125, 0.600, _PCIE_4),
    _card("A10G", 24, 70, 0.600, _PCIE_4),
    _card("A40", 48, 149.7, 0.696, _PCIE_4),
    _card("A100-40", 40, 312, 1.555, _PCIE_4, 300),
    _card("A100-80", 80, 312, 2.039, _PCIE_4, 300),
    _card("A100-40 PCIe", 40, 312, 1.555, _PCIE_4),
    _card("A100 PCIe", 80, 312, 1.935, _PCIE_4),
    _card("L4", 24, 121, 0.300, _PCIE_4),
    _card("L40S", 48, 362, 0.864, _PCIE_4),
    _card("H100", 80, 989, 3.35, _PCIE_5, 450),
    _card("H100 PCIe", 80, 756, 2.0, _PCIE_5),
    _card("H100 NVL", 94, 835, 3.9, _PCIE_5),
    _card("H200", 141, 989, 4.8, _PCIE_5, 450),
    _card("H200 NVL", 141, 835, 4.8, _PCIE_5),
    _card("GH200", 96, 989, 4.0, 450e9, 450),
    _card("B200", 180, 2250, 8.0, _PCIE_5, 900),
    _card("B300", 270, 2250, 8.0, _PCIE_5, 900),
    _card("GB200", 186, 2500, 8.0, 450e9, 900),
    _card("GB300", 279, 2500, 8.0, 450e9, 900),
    _card("RTX 3090", 24, 71, 0.936, _PCIE_4),
    _card("RTX 4090", 24, 165.2, 1.008, _PCIE_4),
    _card("RTX 5090", 32, 209.5, 1.792, _PCIE_5),
    _card("RTX 6000 Ada", 48, 364.2, 0.960, _PCIE_4),
    _card("RTX PRO 6000", 96, 503.8, 1.792, _PCIE_5),
]
CARDS = {card.name: card for card in _ALL}
# Further names of devices, beside the names above. Their links may be narrower.
_DEVICES = {
    "A100": "A100-80",
    "A100 40GB": "A100-40",
    "A100 PCIE 40GB": "A100-40 PCIe",
    "A800": "A100-80",
    "A800 40GB": "A100-40",
    "A800 PCIE": "A100 PCIe",
    "H800": "H100",
    "H800 PCIE": "H100 PCIe",
    "RTX PRO 6000 Workstation": "RTX PRO 6000",
}


def card_named(name: str) -> Card:
    """Return the card of `--gpu`: a name of the table, however it is spaced, or a device's name.

    Raises UserError.
    """
    known = {_plain(other): card for other, card in CARDS.items()} | {"a100": CARDS["A100-80"]}
    if card := card_of(name) or known.get(_plain(name)):
        return card
    near = difflib.get_close_matches(_plain(name), known, n=3, cutoff=0.5)
    near.sort(key=lambda key: key not in _plain(name) and _plain(name) not in key)
    names = ", ".join(dict.fromkeys(known[key].name for key in near or known))
    raise UserError(
        f"--gpu {name}: the rates of this card are not known - use one of {names}; or the card "
        "most like it, with --gpu-memory, --gpu-tflops and --nvlink-gbps of yours"
    )


def card_of(device_name: str) -> Card | None:
    """Return the card of a device, such as NVIDIA H100 80GB HBM3, or None if it is not known."""
    words = set(re.split(r"[\s-]+", device_name.lower()))
    names = {name: name for name in CARDS} | _DEVICES
    # Two devices share the words RTX PRO 6000, so the table names the faster one by a third word.
    fitting = [name for name in names if words.issuperset(name.lower().split())]
    fitting = [name for name in fitting if name != "RTX PRO 6000"]
    if not fitting or words & _OTHER_DEVICES:
        return None
    return CARDS[names[max(fitting, key=lambda name: len(name.split()))]]


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|generation|sxm\d?|(?<=\s)\d+gb$|gb$|[^a-z0-9]", "", name.lower())
