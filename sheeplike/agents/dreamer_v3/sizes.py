"""Model sizes of DreamerV3 (``danijar/dreamerv3`` ``configs.yaml``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Widths of the model.

    Attributes:
        deter: deterministic recurrent state ``D``; must divide by 8 blocks.
        hidden: hidden layers of the recurrent model.
        classes: classes ``K`` of each of the 32 categorical groups.
        depth: base channels of the convolutions; must divide by 2.
        units: hidden layers of encoder, decoder and heads.
    """

    deter: int
    hidden: int
    classes: int
    depth: int
    units: int


SIZES = {
    "1m": Size(deter=512, hidden=64, classes=4, depth=4, units=64),
    "12m": Size(deter=2048, hidden=256, classes=16, depth=16, units=256),
    "25m": Size(deter=3072, hidden=384, classes=24, depth=24, units=384),
    "50m": Size(deter=4096, hidden=512, classes=32, depth=32, units=512),
    "100m": Size(deter=6144, hidden=768, classes=48, depth=48, units=768),
    "200m": Size(deter=8192, hidden=1024, classes=64, depth=64, units=1024),
    "400m": Size(deter=12288, hidden=1536, classes=96, depth=96, units=1536),
}
