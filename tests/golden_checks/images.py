"""Image preprocessing of the three systems, by the transforms that users get."""

from __future__ import annotations

from PIL import Image

from mmkit.config import EncoderConfig
from mmkit.models.build import encoder_transform
from tests.golden_checks.case import Case

# output -> (encoder whose numbers are used, how the image is made square)
VARIANTS = {
    "out.cambrian_clip": ("clip-l-336", "pad"),
    "out.cambrian_dino": ("dinov2-g-378", "pad"),
    "out.llava_pad": ("clip-l-336", "pad"),
    "out.ferret_square_nocrop": ("clip-l-336", "stretch"),
}


def check(case: Case) -> None:
    """Every variant the file has."""
    image = Image.fromarray(case["in.image_rgb"].numpy())
    found = [name for name in case.tensors if name.startswith("out.")]
    assert found and set(found) <= set(VARIANTS), found
    for name in found:
        encoder, fit = VARIANTS[name]
        transform = encoder_transform(EncoderConfig(name=encoder, side=1, resolution=case.json["resolution"]), fit)
        case.close(transform(image), name)
