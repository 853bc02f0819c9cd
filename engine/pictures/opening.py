"""Opens pictures: reads size and content hash from the header, and decodes later.

Nothing is decoded before the limits were checked. Sizes and pixels are those after the rotation
that the file asks for, and colours are RGB, as transformers loads pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO

from PIL import Image, ImageOps

from engine.errors import RequestError, RequestTypeError
from engine.messages.text import Decode
from engine.pictures.errors import PARAM, refused
from engine.pictures.sources import MAX_BYTES, Given

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
MAX_PIXELS = 64 << 20
LARGE_PIXELS = 16 << 20
LOW_SIDE = 512  # pixels of the longer side at most, for detail "low"
ORIENTATION = 0x0112  # an EXIF tag
TURNED = (5, 6, 7, 8)  # its values that swap width and height
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Picture:
    """A picture whose header is read."""

    width: int
    height: int
    digest: str
    """Identifies the content: blake2b of the file, or of the pixels, and the width."""
    _image: Image.Image
    _whole: tuple[int, int]
    """Width and height before the picture is shrunk to those above."""
    _file: bytes | None = None

    @property
    def is_large(self) -> bool:
        """Whether decoding takes much memory."""
        return self.num_pixels > LARGE_PIXELS

    @property
    def num_pixels(self) -> int:
        """Pixels that are decoded."""
        return self._whole[0] * self._whole[1]

    def job(self) -> Decode:
        """The job of a text process that decodes this picture."""
        is_raw = self._file is None
        content = self._image.tobytes() if self._file is None else self._file
        return Decode(content, is_raw, self._whole, (self.width, self.height))

    @property
    def num_bytes(self) -> int:
        """Bytes of the content of its job."""
        return 3 * self.num_pixels if self._file is None else len(self._file)

    def decode(self) -> Image.Image:
        """The picture in RGB, rotated as the file says, then shrunk. Raises ``RequestError`` if the
        file is damaged."""
        try:
            image = _in_colours(self._image)
        except Exception as error:  # decoders raise many kinds
            raise damaged(error) from error
        if image.size != self._whole:
            width, height = self._whole
            raise damaged(
                f"the header says {width} x {height} pixels, and the content has "
                f"{image.width} x {image.height}"
            )
        size = (self.width, self.height)
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def open_picture(given: Given) -> Picture:
    """Open a picture: the bytes of a file, or a PIL image. Raises ``RequestError`` if it is
    neither, damaged, too large or of a format that is not allowed."""
    value = given.value
    if isinstance(value, Image.Image):
        _check_size(*value.size)
        plain = _plain(value)  # a copy: the user may change theirs before it is decoded
        return _shrunk(plain.size, _digest_of(plain), plain, given.detail)
    if not isinstance(value, bytes | bytearray | memoryview):
        raise RequestTypeError(
            f"a picture is {value!r:.40} ({type(value).__name__}), must be a PIL image "
            "(PIL.Image.fromarray makes one of an array), the bytes of a file, a URL or a path",
            param=PARAM,
        )
    content = bytes(value)
    if len(content) > MAX_BYTES:
        raise refused(f"a picture has {len(content)} bytes, the limit is {MAX_BYTES}: shrink it")
    if size := _size_of_webp(content):  # Pillow takes the memory when it opens one
        _check_size(*size)
    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise refused(f"a picture is too large ({error}): shrink it") from error
    except Exception as error:  # readers of headers raise many kinds
        raise refused(
            f"a picture of {len(content)} bytes cannot be read as {', '.join(FORMATS)}: it is "
            "damaged or of another format; convert it to PNG"
        ) from error
    _check_size(*image.size)
    digest = blake2b(content, digest_size=DIGEST_BYTES).hexdigest()
    return _shrunk(_turned(image), digest, image, given.detail, content)


def picture_of(job: Decode) -> Picture:
    """The picture of a job. Raises ``RequestError`` for a damaged one."""
    try:
        if job.is_raw:
            image = Image.frombytes("RGB", job.whole, job.content)
        else:
            image = Image.open(BytesIO(job.content), formats=FORMATS)
    except Exception as error:  # readers of headers raise many kinds
        raise damaged(error) from error
    return Picture(*job.size, "", image, job.whole)


def damaged(reason: object) -> RequestError:
    """The error for a picture that cannot be decoded."""
    return refused(f"a picture is damaged: {reason}; send it as a whole, or convert it to PNG")


def _shrunk(
    size: tuple[int, int], digest: str, image: Image.Image, detail: str, file: bytes | None = None
) -> Picture:
    longer = max(size)
    if detail != "low" or longer <= LOW_SIDE:
        return Picture(*size, digest, image, size, file)
    width, height = (max(1, round(side * LOW_SIDE / longer)) for side in size)
    return Picture(width, height, f"{digest} {width}", image, size, file)


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise refused(
            f"a picture has {width} x {height} pixels, the limit is {MAX_PIXELS}: shrink it"
        )
    if not width or not height:
        raise refused(f"a picture has {width} x {height} pixels, must have at least one")


def _size_of_webp(content: bytes) -> tuple[int, int] | None:
    """Width and height in the header of a WebP file; ``None`` for other files."""
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP":
        return None
    kind = content[12:16]
    if kind == b"VP8X":
        sides = content[24:27], content[27:30]
        return int.from_bytes(sides[0], "little") + 1, int.from_bytes(sides[1], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(content[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    bits = int.from_bytes(content[26:30], "little")
    return (bits & 0x3FFF) or 1, (bits >> 16 & 0x3FFF) or 1


def _turned(image: Image.Image) -> tuple[int, int]:
    """Width and height after the rotation that the header asks for."""
    try:
        # Not ``image.getexif``, which decodes a PNG to find what follows the pixels.
        orientation = Image.Image.getexif(image).get(ORIENTATION)
    except Exception as error:
        raise damaged(error) from error
    width, height = image.size
    return (height, width) if orientation in TURNED else (width, height)


def _in_colours(image: Image.Image) -> Image.Image:
    """A picture in RGB, rotated as its file says."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "P" and isinstance(upright.info.get("transparency"), bytes):
        upright = upright.convert("RGBA")  # in one go Pillow warns of lost transparency
    return upright.convert("RGB")


def _plain(image: Image.Image) -> Image.Image:
    """A copy of a PIL image, rotated, in RGB, without metadata, but with the colour that is
    transparent: image processors put its pixels on white."""
    try:
        plain = _in_colours(image)
    except Exception as error:
        raise damaged(error) from error
    plain.info = {key: plain.info[key] for key in ("transparency",) if key in plain.info}
    return plain


def _digest_of(plain: Image.Image) -> str:
    """The hash of the pixels of a plain image, and of its transparent colour."""
    shape = (plain.size, plain.info.get("transparency"))
    digest = blake2b(repr(shape).encode(), digest_size=DIGEST_BYTES)
    digest.update(plain.tobytes())
    return digest.hexdigest()
