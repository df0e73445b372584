"""Pictures from paths, bytes and arrays to upright RGB, whatever their kind.

Pillow decodes: a 640x480 JPEG takes it 1.56 ms (simplejpeg 1.33, torchvision 1.53), 1600x1200 11.1 (8.1, 9.3), PNGs the same, and it alone reads
every format and gives the images that the published preprocessing resizes. Every failure is an `ImageError` that says which picture and why.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mmkit.data.example import ImageRef
from mmkit.errors import InputError

MAX_PIXELS = 178_956_970  # Pillow's own limit for a decompression bomb; 512 MB as RGB
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # EXIF tag; values that swap width and height
_WIDTH, _HEIGHT = 0x0100, 0x0101  # TIFF tags
_DAMAGED = (  # what Pillow's decoders raise on damaged data; AVIF's RuntimeError, for one, is no OSError
    OSError, SyntaxError, ValueError, EOFError, RuntimeError, TypeError, LookupError, ArithmeticError, AttributeError, struct.error,
    Image.DecompressionBombError,
)  # fmt: skip


class ImageError(InputError):
    """A picture that cannot be used; ``reason`` is a short word for counting."""

    def __init__(self, message: str, reason: str = "undecodable image"):
        super().__init__(message)
        self.message, self.reason = message, reason

    def __reduce__(self):
        return (ImageError, (self.message, self.reason))


def open_image(ref: ImageRef, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture as upright RGB: first frame, EXIF rotation applied, transparency over white, 16-bit scaled to 8.

    Raises ImageError for a missing, truncated, unknown or too large picture.
    """
    if isinstance(ref.data, np.ndarray):
        return _to_rgb(_of_array(ref))
    image = _lazy(ref, max_pixels)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.load()
            if _orientation(image) not in (None, 1):
                image = ImageOps.exif_transpose(image)
            return _to_rgb(image)
    except _DAMAGED as error:
        reason = "truncated image" if "trunc" in str(error).lower() else "undecodable image"
        raise ImageError(f"image {ref.told} does not decode ({error})", reason) from None


def image_size(ref: ImageRef, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Upright (width, height), read from the header alone."""
    if isinstance(ref.data, np.ndarray):
        _of_array(ref, corner=True)
        return ref.data.shape[1], ref.data.shape[0]
    image = _lazy(ref, max_pixels)
    return image.size[::-1] if _orientation(image) in _TURNED and not _size_is_upright(image) else image.size


def content_hash(ref: ImageRef) -> str:
    """SHA-256 of the picture's bytes (or pixels): the same picture under two names has one hash."""
    data = ref.data
    if isinstance(data, str | Path):
        try:
            data = _read(data)
        except FileNotFoundError as error:
            raise _absent(ref, error) from None
        except OSError as error:
            raise ImageError(f"image {ref.told} cannot be read ({error})", "missing image") from None
    elif not isinstance(data, bytes):
        array = np.asarray(data)
        data = repr((array.shape, array.dtype.str)).encode() + array.tobytes()
    return hashlib.sha256(data).hexdigest()


def _lazy(ref: ImageRef, max_pixels: int) -> Image.Image:
    """The opened, not yet decoded picture."""
    data: Any = ref.data
    if isinstance(data, Image.Image):
        return data
    if not isinstance(data, str | Path | bytes):
        raise ImageError(f"an image is a {type(data).__name__}; give a path, a URL, encoded bytes, a Pillow image or an array")
    try:
        if isinstance(data, str) and "://" in data:
            data = _read(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data) if isinstance(data, bytes) else data)
    except FileNotFoundError as error:
        raise _absent(ref, error) from None
    except Image.DecompressionBombError:
        raise ImageError(f"image {ref.told} has more than the allowed {max_pixels:,} pixels", "too large image") from None
    except UnidentifiedImageError:
        raise ImageError(f"image {ref.told} is of no known image format") from None
    except _DAMAGED as error:
        raise ImageError(f"image {ref.told} cannot be opened ({str(error)[:120]})") from None
    if image.width * image.height > max_pixels:
        raise ImageError(
            f"image {ref.told} has {image.width}x{image.height} pixels, more than the allowed {max_pixels:,}", "too large image"
        )
    return image


def _of_array(ref: ImageRef, corner: bool = False) -> Image.Image:
    """The picture of an array, or its first pixel, which tells as well whether its layout can be read."""
    array = ref.data
    if array.ndim > 1 and array.size:
        with contextlib.suppress(*_DAMAGED):
            return Image.fromarray(array[:1, :1] if corner else array)
    raise ImageError(
        f"image {ref.told} is an array of shape {array.shape} and type {array.dtype}; "
        "give (height, width) of numbers or (height, width, 3 or 4) of uint8"
    )


def _absent(ref: ImageRef, error: FileNotFoundError) -> ImageError:
    """Of a file that is not there, or of a URL that did not answer: fsspec calls both FileNotFoundError, the latter with a cause."""
    cause = error.__cause__
    if cause is None or isinstance(cause, FileNotFoundError):
        return ImageError(f"image {ref.told} does not exist", "missing image")
    return ImageError(f"image {ref.told} cannot be fetched ({type(cause).__name__}: {cause})", "unreachable image")


def _orientation(image: Image.Image) -> int | None:
    """EXIF orientation; reading it is skipped where the format has none, since parsing EXIF is slow."""
    if image.format not in ("JPEG", "MPO", "TIFF", "WEBP", "PNG", "HEIF", "AVIF"):
        return None
    if image.format == "JPEG" and "exif" not in image.info:
        return None
    try:
        return image.getexif().get(_ORIENTATION)
    except (OSError, SyntaxError, ValueError, KeyError):  # damaged EXIF must not lose a good picture
        return None


def _size_is_upright(image: Image.Image) -> bool:
    """Whether Pillow has turned the size already: it does so for TIFF when it opens the file, from version 11.1 on."""
    return image.format == "TIFF" and image.size != (image.tag_v2[_WIDTH], image.tag_v2[_HEIGHT])


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith(("I", "F")):
        return _from_deep(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _from_deep(image: Image.Image) -> Image.Image:
    """16-bit or float grey to RGB: 0..65535 becomes 0..255 (Pillow alone would clip at 255); values up to 255 stay."""
    values = np.asarray(image).astype(np.float64)
    if values.size and image.mode.startswith("I") and values.max() > 255:
        values = values / 257
    elif values.size and image.mode == "F" and values.max() <= 1:
        values = values * 255
    return Image.fromarray(values.clip(0, 255).round().astype(np.uint8)).convert("RGB")


def _read(path: str | Path) -> bytes:
    if "://" in str(path):
        import fsspec

        with fsspec.open(str(path), "rb") as file:
            return file.read()
    return Path(path).read_bytes()
