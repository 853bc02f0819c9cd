"""Files of pictures that are bombs, damaged, lying, of other formats, or valid and strange."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from PIL import Image

SIZE = (50, 30)
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
NO_PICTURE = "cannot be read as BMP, GIF, JPEG, PNG, WEBP"
BROKEN = f"{NO_PICTURE}|damaged"
LARGE = "the limit is 67108864|too large"
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def saved(kind: str, size: tuple[int, int] = SIZE, mode: str = "RGB", **options: Any) -> bytes:
    """A picture of a pattern in a format of Pillow."""
    file = BytesIO()
    image = Image.linear_gradient("L").resize(size).convert(mode)
    image.save(file, kind, **options)
    return file.getvalue()


def black(width: int, height: int) -> bytes:
    """A small PNG file of many pixels."""
    file = BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file."""
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def png(width: int, height: int, pixels: bytes | None, *more: bytes, depth: int = 8) -> bytes:
    """A PNG file in RGB. pixels: compressed; ``None``: black ones."""
    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    if pixels is None:
        pixels = zlib.compress(bytes((3 * width + 1) * height))
    chunks = [chunk(b"IHDR", header), *more, chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return SIGNATURE + b"".join(chunks)


def gif(width: int, height: int, *frames: tuple[int, int, int, int]) -> bytes:
    """A GIF file of one colour. frames: left, top, width and height of each."""
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    image = b"".join(
        b"," + struct.pack("<HHHHB", *frame, 0) + b"\x02\x02\x44\x01\x00" for frame in frames
    )
    return head + image + b";"


def bmp(width: int, height: int, pixels: bytes = b"", bits: int = 24) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(pixels), 0, 0, 54) + header + pixels


def webp(kind: bytes, content: bytes) -> bytes:
    body = b"WEBP" + kind + struct.pack("<I", len(content)) + content
    return b"RIFF" + struct.pack("<I", len(body)) + body


def segment(marker: int, content: bytes) -> bytes:
    """A segment of a JPEG file."""
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


def with_segments(*segments: bytes) -> bytes:
    whole = saved("JPEG")
    return whole[:2] + b"".join(segments) + whole[2:]


def exif(*entries: tuple[int, int, int, int], after: int = 0) -> bytes:
    """EXIF data. entries: tag, type, count and value of each; after: offset of the next list."""
    packed = b"".join(struct.pack("<HHII", *each) for each in entries)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + packed + struct.pack("<I", after)


def frame_header(width: int, height: int) -> bytes:
    """A JPEG file whose header has another size than its pixels."""
    whole = saved("JPEG")
    place = whole.index(b"\xff\xc0") + 5
    return whole[:place] + struct.pack(">HH", height, width) + whole[place + 4 :]


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
LAUGHS = (
    b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">'
    b'<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]><svg xmlns="http://www.w3.org/2000/svg">&c;</svg>'
)
MEGA = 1 << 20
WRONG: dict[str, tuple[bytes, str]] = {
    # bombs
    "PNG of 20,000 pixels a side": (black(20_000, 20_000), LARGE),
    "PNG of 2**30 pixels a side": (png(1 << 30, 1 << 30, b""), LARGE),
    "PNG of 2**31 - 1 pixels a side": (png(2**31 - 1, 2**31 - 1, b""), f"{LARGE}|{NO_PICTURE}"),
    "PNG of one row of 2**31 - 1 pixels": (png(2**31 - 1, 1, b""), LARGE),
    "GIF of 65,535 pixels a side": (gif(65_535, 65_535, (0, 0, 1, 1)), LARGE),
    "BMP of 60,000 pixels a side": (bmp(60_000, 60_000), LARGE),
    "BMP upside down": (bmp(60_000, -60_000), LARGE),
    "WebP of 16,384 pixels a side": (
        webp(b"VP8X", b"\0\0\0\0\xff\x3f\0\xff\x3f\0"), "16384 x 16384 pixels, the limit",
    ),
    "WebP of 2**24 pixels a side": (webp(b"VP8X", bytes(4) + b"\xff" * 6), LARGE),
    "lossless WebP of 16,384 pixels a side": (
        webp(b"VP8L", b"\x2f" + struct.pack("<I", 0x0FFFFFFF)), "16384 x 16384 pixels, the limit",
    ),
    "lossy WebP of 16,383 pixels a side": (
        webp(b"VP8 ", b"\x30\x01\x00\x9d\x01\x2a\xff\x3f\xff\x3f"), LARGE,
    ),
    "JPEG of 65,000 pixels a side": (frame_header(65_000, 65_000), LARGE),
    "TIFF of 60,000 pixels a side": (saved("TIFF", mode="1", compression="group4"), NO_PICTURE),
    "JPEG 2000 of 60,000 pixels a side": (
        b"\0\0\0\x0cjP  \r\n\x87\n\0\0\0\x14ftypjp2 \0\0\0\0jp2 \0\0\0\x2djp2h\0\0\0\x16ihdr"
        + struct.pack(">IIHBBBB", 60_000, 60_000, 3, 7, 7, 0, 0), NO_PICTURE,
    ),
    "code stream of JPEG 2000": (
        b"\xff\x4f\xff\x51\0\x29\0\0" + struct.pack(">II", 60_000, 60_000), NO_PICTURE,
    ),
    "text of 8 MiB in a small PNG": (
        png(9, 9, b"", chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(8 * MEGA)))), BROKEN,
    ),
    # other formats
    "text": (b"not a picture", NO_PICTURE),
    "one byte": (b"\x00", NO_PICTURE),
    "10 MiB of zeros": (bytes(10 * MEGA), NO_PICTURE),
    "SVG": (SVG, NO_PICTURE),
    "SVG with entities": (LAUGHS, NO_PICTURE),
    "compressed SVG": (gzip.compress(SVG + b" " * MEGA), NO_PICTURE),
    "HTML": (b"<html><script>alert(1)</script>", NO_PICTURE),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", NO_PICTURE),
    "PDF": (b"%PDF-1.7\n", NO_PICTURE),
    "ZIP": (b"PK\x03\x04" + bytes(26), NO_PICTURE),
    "pickle": (b"cos\nsystem\n(S'true'\ntR.", NO_PICTURE),
    "TIFF": (saved("TIFF"), NO_PICTURE),
    "icon": (saved("ICO"), NO_PICTURE),
    "Targa": (saved("TGA"), NO_PICTURE),
    "PCX": (saved("PCX"), NO_PICTURE),
    "PPM": (saved("PPM"), NO_PICTURE),
    "HEIF": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", NO_PICTURE),
    "Photoshop": (b"8BPS\0\1" + bytes(20), NO_PICTURE),
    "GIF that is a script": (b"GIF89a=1;alert(1)//", BROKEN),
    # headers that lie, and contents that lack something
    "PNG with nothing": (SIGNATURE, NO_PICTURE),
    "PNG without pixels": (png(9, 9, b""), BROKEN),
    "PNG without its header": (SIGNATURE + chunk(b"IDAT", zlib.compress(bytes(28 * 9))), BROKEN),
    "PNG with too few pixels": (png(900, 900, zlib.compress(bytes(9))), BROKEN),
    "PNG of wrong pixels": (png(9, 9, b"no zlib"), BROKEN),
    "PNG of no width": (png(0, 9, zlib.compress(b"")), f"must have at least one|{BROKEN}"),
    "PNG of no height": (png(9, 0, zlib.compress(b"")), f"must have at least one|{BROKEN}"),
    "PNG of 3 bits": (png(9, 9, None, depth=3), BROKEN),
    "PNG whose chunk has 2**31 bytes": (SIGNATURE + b"\x7f\xff\xff\xffIHDR" + bytes(99), BROKEN),
    "PNG with a wrong checksum": (
        png(9, 9, None).replace(b"IHDR\0\0\0\x09", b"IHDR\0\0\0\x08"), BROKEN,
    ),
    "PNG with an ICC profile that is a bomb": (
        png(50, 30, None, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(80 * MEGA)))), BROKEN,
    ),
    "GIF of no size": (gif(0, 0), f"must have at least one|{BROKEN}"),
    "GIF without a frame": (gif(9, 9), BROKEN),
    "BMP of no height": (bmp(5, 0), f"must have at least one|{BROKEN}"),
    "BMP without pixels": (bmp(500, 500), BROKEN),
    "BMP of 77 bits": (bmp(5, 5, bytes(99), bits=77), BROKEN),
    "BMP with a header of 2**32 - 1 bytes": (b"BM" + bytes(12) + b"\xff" * 4 + bytes(40), BROKEN),
    "JPEG of no size": (frame_header(0, 0), f"must have at least one|{BROKEN}"),
    "JPEG without a table": (saved("JPEG").replace(b"\xff\xdb", b"\xff\xfe"), BROKEN),
    "JPEG of segments without an end": (b"\xff\xd8" + b"\xff\xe1\0\2" * 1000, BROKEN),
    "WebP of another frame": (webp(b"VP8X", b"\0\0\0\0" + b"\x09\0\0" * 2), BROKEN),
    "WebP shorter than it says": (b"RIFF\xff\xff\xff\x7fWEBPVP8L\xff\xff\xff\x7f\x2f", BROKEN),
}  # fmt: skip
"""Content and the reason that the error has, by name. Reasons are separated by "|"."""

STRANGE: dict[str, bytes] = {
    "JPEG of more pixels than it has": frame_header(4_000, 4_000),
    "1 x 100,000": black(1, 100_000),
    "100,000 x 1": black(100_000, 1),
    "100,000 frames": gif(50, 30, *[(0, 0, 1, 1)] * 100_000),
    "frame outside of a GIF": gif(50, 30, (0, 0, 1, 1), (60_000, 60_000, 1, 1)),
    "ICC profile of 10 MB": saved("JPEG", icc_profile=bytes(10 * MEGA)),
    "EXIF of 10 MB": png(50, 30, None, chunk(b"eXIf", exif((0x0112, 3, 1, 1)) + bytes(10 * MEGA))),
    "EXIF with 2**32 - 1 entries": with_segments(
        segment(0xE1, b"Exif\0\0" + exif((0x0112, 3, 2**32 - 1, 8)))
    ),
    "EXIF that leads to itself": with_segments(
        segment(0xE1, b"Exif\0\0" + exif((0x8769, 4, 1, 8), (0x0112, 3, 1, 1), after=8))
    ),
    "EXIF with rotation 99": with_segments(segment(0xE1, b"Exif\0\0" + exif((0x0112, 3, 1, 99)))),
    "ZIP after a PNG": saved("PNG") + b"PK\x03\x04" + bytes(99),
    "script after a JPEG": saved("JPEG") + b"<script>alert(1)</script>",
    "script in a comment of a GIF": saved("GIF", comment=b"<script>alert(1)</script>"),
    "PNG without an end": saved("PNG")[:-12],
}
"""Pictures that are valid, and that some programs take much time or memory for."""


def truncated() -> Iterator[tuple[str, bytes]]:
    """Files that end within each part."""
    for kind in FORMATS:
        content = saved(kind)
        places = {1, 4, 8, 12, 16, 24, 33, *(len(content) * tenth // 10 for tenth in range(1, 9))}
        for place in sorted(places):
            yield f"{kind} of {place} of {len(content)} bytes", content[:place]
