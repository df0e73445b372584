"""Every kind of picture becomes upright RGB, or an error that names it."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image, features

from mmkit.data.example import ImageRef
from mmkit.data.images import ImageError, content_hash, image_size, open_image


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixel(data, x=0, y=0):
    return open_image(ImageRef(data)).getpixel((x, y))


def test_transparent_pixels_show_white_and_half_transparent_ones_mix():
    rgba = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    rgba.putpixel((1, 0), (255, 0, 0, 255))
    assert pixel(encoded(rgba)) == (255, 255, 255) and pixel(encoded(rgba), 1) == (255, 0, 0)
    assert pixel(encoded(Image.new("LA", (1, 1), (0, 0)))) == (255, 255, 255)


def test_palette_with_transparency():
    image = Image.new("P", (1, 1), 0)
    image.putpalette([10, 20, 30] + [0] * 765)
    assert pixel(encoded(image)) == (10, 20, 30)
    assert pixel(encoded(image, transparency=0)) == (255, 255, 255)


def test_sixteen_bits_are_scaled_not_clipped():
    values = np.array([[0, 257 * 128, 65535]], dtype=np.uint16)
    data = encoded(Image.fromarray(values))
    assert [pixel(data, x) for x in range(3)] == [(0,) * 3, (128,) * 3, (255,) * 3]


def test_float_and_small_integers():
    assert pixel(Image.fromarray(np.full((1, 1), 0.5, np.float32))) == (128,) * 3
    assert pixel(Image.fromarray(np.full((1, 1), 200, np.int32))) == (200,) * 3


def test_cmyk_jpeg():
    red, green, blue = pixel(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert red > 200 and green < 60 and blue < 60


@pytest.mark.parametrize(
    "kind, options", [("JPEG", {"quality": 95}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"})]
)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied_to_pixels_and_size(orientation, kind, options):
    image = Image.new("RGB", (30, 20), "white")
    image.paste("black", (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, kind, exif=exif, **options)
    upright = open_image(ImageRef(data))
    assert upright.size == image_size(ImageRef(data)) == ((20, 30) if orientation > 4 else (30, 20))
    opened = Image.open(io.BytesIO(data))
    assert image_size(ImageRef(opened)) == open_image(ImageRef(opened)).size == image_size(ImageRef(opened)) == upright.size
    corner = {1: "tl", 2: "tr", 3: "br", 4: "bl", 5: "tl", 6: "tr", 7: "br", 8: "bl"}[orientation]
    x = 1 if corner[1] == "l" else upright.width - 2
    y = 1 if corner[0] == "t" else upright.height - 2
    assert upright.getpixel((x, y))[0] < 60


def test_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixel(data) == (255, 0, 0)


def test_one_pixel_and_arrays():
    assert open_image(ImageRef(encoded(Image.new("1", (1, 1), 1)))).size == (1, 1)
    assert open_image(ImageRef(np.zeros((2, 3), np.uint8))).size == image_size(ImageRef(np.zeros((2, 3), np.uint8))) == (3, 2)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_truncated_picture_is_an_error(kind):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    data = encoded(noise, kind)
    with pytest.raises(ImageError, match="'shard/7.jpg' does not decode"):
        open_image(ImageRef(data[: len(data) // 2], name="shard/7.jpg"))


def test_missing_unknown_and_huge_pictures_say_why(tmp_path):
    with pytest.raises(ImageError, match="nothing.png' does not exist") as caught:
        open_image(ImageRef(str(tmp_path / "nothing.png")))
    assert caught.value.reason == "missing image"
    with pytest.raises(ImageError, match="no known image format"):
        open_image(ImageRef(b"plain text"))
    with pytest.raises(ImageError, match="100x100 pixels, more than the allowed 9,999") as caught:
        open_image(ImageRef(encoded(Image.new("L", (100, 100)))), max_pixels=9_999)
    assert pickle.loads(pickle.dumps(caught.value)).reason == "too large image"


@pytest.mark.parametrize(
    "data, message",
    [
        (np.zeros((4, 4, 3)), r"shape \(4, 4, 3\) and type float64; give \(height, width\)"),
        (np.zeros((3, 4, 5), np.uint8), r"array of shape \(3, 4, 5\) and type uint8"),
        (np.zeros(4, np.uint8), r"array of shape \(4,\)"),
        (np.zeros((0, 4), np.uint8), r"array of shape \(0, 4\)"),
        (["a.png"], "an image is a list; give a path"),
        (None, "an image is a NoneType"),
    ],
)
def test_arrays_of_another_layout_and_other_things_are_refused_by_both_readers(data, message):
    for read in (open_image, image_size):
        with pytest.raises(ImageError, match=message):
            read(ImageRef(data))


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow does not read AVIF")
def test_a_damaged_avif_is_an_image_error_though_its_decoder_raises_something_else():
    data = bytearray(encoded(Image.new("RGB", (16, 16)), "AVIF"))
    place = data.index(b"av01")  # the kind of its item
    data[place : place + 4] = b"zzzz"
    for read in (open_image, image_size):
        with pytest.raises(ImageError, match="'a.avif' cannot be opened .*Missing or empty image item"):
            read(ImageRef(bytes(data), name="a.avif"))


def test_a_url_that_does_not_answer_is_not_called_missing():
    pytest.importorskip("aiohttp")
    with pytest.raises(ImageError, match="cannot be fetched .*Cannot connect") as caught:
        open_image(ImageRef("http://127.0.0.1:9/a.png"))
    assert caught.value.reason == "unreachable image"
    with pytest.raises(ImageError, match="cannot be fetched"):
        content_hash(ImageRef("http://127.0.0.1:9/a.png"))
    with pytest.raises(ImageError, match="does not exist"):
        open_image(ImageRef("memory://nothing/a.png"))


def test_content_hash_ignores_the_name(tmp_path):
    data = encoded(Image.new("RGB", (2, 2)))
    (tmp_path / "a.png").write_bytes(data)
    assert content_hash(ImageRef(str(tmp_path / "a.png"))) == content_hash(ImageRef(data, name="b"))
    assert content_hash(ImageRef(np.zeros((2, 3), np.uint8))) != content_hash(ImageRef(np.zeros((3, 2), np.uint8)))
