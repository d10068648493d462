"""Reading sound GGUF files, and refusing every kind of damage with one clear error."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from quire.errors import BadModelFile, ModelNotFound
from quire.quant.ggml_types import GGMLType
from quire.weights import gguf_strings
from quire.weights.gguf import GGUFFile
from quire.weights.gguf_strings import Strings
from tests.tools.gguf_writer import Raw, Tensor, gguf_bytes, string, tensor, u32, u64

pytestmark = pytest.mark.cpu

METADATA = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "a.flag": True,
    "a.number": 0.5,
    "tokens": ["<s>", "é", "", "日本"],
    "scores": np.array([0.0, -1.5], "<f4"),
    "nested": [np.array([1, 2], "<i4"), np.array([3], "<i4")],
}
MATRIX = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)
TENSORS = {"norm": tensor(MATRIX[0]), "matrix": tensor(MATRIX, GGMLType.Q8_0), "plain": tensor(MATRIX[:3])}
SOUND = gguf_bytes(METADATA, TENSORS)


def parse(tmp_path, data):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return GGUFFile(path)


def refused(tmp_path, data, *words):
    """Parsing fails with a message that names the file, says what is wrong and ends in advice."""
    with pytest.raises(BadModelFile) as error:
        parse(tmp_path, data)
    message = str(error.value)
    assert "model.gguf" in message
    for word in words:
        assert str(word) in message, message
    return message


def one(name="t", **changes):
    fields = {"type": GGMLType.F32, "shape": (2, 4), "data": bytes(32)} | changes
    return {name: Tensor(**fields)}


@pytest.mark.parametrize("version", [2, 3])
def test_reads_metadata_and_tensors(tmp_path, version):
    with parse(tmp_path, gguf_bytes(METADATA, TENSORS, version=version)) as file:
        assert list(file.metadata) == list(METADATA)
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["a.flag"] is True
        assert file.metadata["a.number"] == 0.5
        assert file.metadata["tokens"].tolist() == METADATA["tokens"]
        assert len(file.metadata["tokens"]) == len(METADATA["tokens"])
        assert file.metadata["scores"].tolist() == [0.0, -1.5]
        assert [part.tolist() for part in file.metadata["nested"]] == [[1, 2], [3]]
        assert {name: info.shape for name, info in file.tensors.items()} == {
            "norm": (64,),
            "matrix": (8, 64),
            "plain": (3, 64),
        }
        assert file.tensors["matrix"].type is GGMLType.Q8_0
        assert file.tensors["matrix"].nbytes == 8 * 2 * 34


def test_raw_is_the_file_s_bytes_and_survives_close(tmp_path):
    file = parse(tmp_path, SOUND)
    raw, matrix = file.raw("plain"), file.raw("matrix")
    assert raw.shape == (3, 256)
    assert matrix.shape == (8, 68)
    assert matrix.tobytes() == TENSORS["matrix"].data
    assert not raw.flags.writeable
    assert file.read("matrix", slice(2, 5)).tobytes() == matrix[2:5].tobytes()
    assert file.read("plain", slice(0, 3)).tobytes() == raw.tobytes()
    file.close()
    assert np.array_equal(raw.view("<f4"), MATRIX[:3])


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path):
    file = parse(tmp_path, SOUND)
    os.truncate(file.path, file.tensors["matrix"].offset + 3)
    with pytest.raises(BadModelFile, match="shorter while 'matrix'"):
        file.read("matrix", slice(0, 8))


@pytest.mark.parametrize("with_extension", [True, False])
@pytest.mark.parametrize("strings", [[], ["a b", " ", "\u0120x y z", "", "no"], ["a b", "\u00e9 c"]])
def test_strings_with_and_without_the_extension(tmp_path, monkeypatch, strings, with_extension):
    if with_extension and gguf_strings.extension() is None:
        pytest.skip("the extension was not built")
    if not with_extension:
        monkeypatch.setattr(gguf_strings, "extension", lambda: None)
    stored = parse(tmp_path, gguf_bytes({"tokens": strings}, {})).metadata["tokens"]
    if not isinstance(stored, Strings):
        assert not strings
        return
    assert stored.tolist() == strings
    pairs = [tuple(string.partition(" ")[::2]) for string in strings]
    assert stored.pairs() == (pairs if all(left and right for left, right in pairs) else None)


def test_a_file_without_tensors_is_sound(tmp_path):
    assert parse(tmp_path, gguf_bytes({"a": 1}, {})).tensors == {}


def test_reading_loads_no_torch():
    code = "import sys, quire.weights.gguf, quire.weights.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_file_is_not_found(tmp_path):
    with pytest.raises(ModelNotFound, match=r"absent\.gguf"):
        GGUFFile(tmp_path / "absent.gguf")


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(BadModelFile, match="cannot be read"):
        GGUFFile(tmp_path)


def test_empty_file(tmp_path):
    refused(tmp_path, b"", "empty", "Download it again")


def test_wrong_magic(tmp_path):
    refused(tmp_path, b"PK\x03\x04" + SOUND[4:], "PK", "GGUF")


@pytest.mark.parametrize("version", [0, 1, 4, 2**32 - 1])
def test_wrong_version(tmp_path, version):
    refused(tmp_path, gguf_bytes({}, {}, version=version), f"version {version}", "2 and 3")


def test_big_endian(tmp_path):
    refused(tmp_path, gguf_bytes({}, {}, version=3 << 24), "big-endian")


def test_truncated_anywhere(tmp_path):
    tensors = parse(tmp_path, SOUND).tensors.values()
    start, end = min(info.offset for info in tensors), max(info.offset + info.nbytes for info in tensors)
    for size in [*range(start), *range(start, end, 32), end - 1]:
        refused(tmp_path, SOUND[:size])


@pytest.mark.parametrize("count", [1000, 2**40, 2**64 - 1])
def test_more_tensors_than_fit(tmp_path, count):
    refused(tmp_path, gguf_bytes(METADATA, TENSORS, num_tensors=count), f"{count} tensors")


@pytest.mark.parametrize("count", [1000, 2**40, 2**64 - 1])
def test_more_entries_than_fit(tmp_path, count):
    refused(tmp_path, gguf_bytes(METADATA, TENSORS, num_entries=count), f"{count} metadata entries")


@pytest.mark.parametrize("length", [10**6, 2**63, 2**64 - 1])
def test_string_longer_than_the_file(tmp_path, length):
    refused(tmp_path, gguf_bytes({"a": Raw(8, u64(length) + b"x")}, {}), "'a'", length)
    key = b"GGUF" + u32(3) + u64(0) + u64(1) + u64(length) + bytes(32)
    refused(tmp_path, key, "entry 0", length)


@pytest.mark.parametrize("kind", range(13))
@pytest.mark.parametrize("count", [10**6, 2**61, 2**64 - 1])
def test_array_longer_than_the_file(tmp_path, kind, count):
    refused(tmp_path, gguf_bytes({"a": Raw(9, u32(kind) + u64(count) + bytes(16))}, {}), "file")


def test_string_in_an_array_past_the_end(tmp_path):
    data = u32(8) + u64(2) + string("fine") + u64(2**62) + b"x"
    refused(tmp_path, gguf_bytes({"a": Raw(9, data)}, {}), "'a'", "the file ends in string 1")


def test_array_nested_too_deep(tmp_path):
    data = b""
    for _ in range(50):
        data += u32(9) + u64(1)
    refused(tmp_path, gguf_bytes({"a": Raw(9, data + u32(4) + u64(0))}, {}), "nested")


@pytest.mark.parametrize("kind", [13, 99, 2**32 - 1])
def test_unknown_value_type(tmp_path, kind):
    refused(tmp_path, gguf_bytes({"a": Raw(kind, bytes(8))}, {}), "'a'", kind)
    refused(tmp_path, gguf_bytes({"a": Raw(9, u32(kind) + u64(1) + bytes(8))}, {}), "'a'", kind)


def test_truth_value_that_is_none(tmp_path):
    refused(tmp_path, gguf_bytes({"a": Raw(7, b"\x02")}, {}), "'a'", "neither 0 nor 1")


def test_duplicate_key(tmp_path):
    refused(tmp_path, gguf_bytes([("a", 1), ("a", 2)], {}), "'a'", "twice")


def test_invalid_utf8(tmp_path):
    refused(tmp_path, gguf_bytes([(b"\xff\xfe", 1)], {}), "UTF-8")
    refused(tmp_path, gguf_bytes({"a": b"\xc3"}, {}), "'a'", "UTF-8")
    data = u32(8) + u64(2) + string("fine") + string(b"\x80")
    strings = parse(tmp_path, gguf_bytes({"a": Raw(9, data)}, {})).metadata["a"]
    with pytest.raises(BadModelFile, match="string 1 of the value of 'a' is not valid UTF-8"):
        strings.tolist()
    refused(tmp_path, gguf_bytes({}, [(b"\xff", tensor(MATRIX))]), "tensor 0", "UTF-8")


@pytest.mark.parametrize("alignment", [0, 3, 48, "32", 32.0, True])
def test_alignment_that_is_no_power_of_two(tmp_path, alignment):
    refused(tmp_path, gguf_bytes({"general.alignment": alignment}, one()), "general.alignment", "power of two")


def test_larger_alignment_is_honoured(tmp_path):
    data = gguf_bytes({"general.alignment": 256}, TENSORS, alignment=256)
    assert np.array_equal(parse(tmp_path, data).raw("plain").view("<f4"), MATRIX[:3])


def test_alignment_past_the_end(tmp_path):
    refused(tmp_path, gguf_bytes({"general.alignment": 2**31}, one()), "ends at")


def test_duplicate_tensor(tmp_path):
    refused(tmp_path, gguf_bytes({}, [*one("t").items(), *one("t").items()]), "'t'", "twice")


@pytest.mark.parametrize("shape", [(), (1, 1, 1, 1, 1), (1,) * 100])
def test_number_of_dimensions(tmp_path, shape):
    refused(tmp_path, gguf_bytes({"a": "room" * 300}, one(shape=shape)), f"{len(shape)} dimensions")


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_empty_dimension(tmp_path, shape):
    refused(tmp_path, gguf_bytes({}, one(shape=shape)), "at least 1")


@pytest.mark.parametrize("shape", [(2**63, 2**63), (2**32, 2**32), (2**62, 4), (3, 4)])
def test_dimensions_beyond_the_file(tmp_path, shape):
    refused(tmp_path, gguf_bytes({}, one(shape=shape)), "'t'", "the file ends at")


def test_dimension_that_is_no_multiple_of_the_block(tmp_path):
    refused(tmp_path, gguf_bytes({}, one(type=GGMLType.Q4_K, shape=(1, 100))), "multiple of 256")


@pytest.mark.parametrize("number", [4, 5, 31, 100, 2**32 - 1])
def test_unknown_tensor_type(tmp_path, number):
    refused(tmp_path, gguf_bytes({}, one(type=number)), "'t'", number)


@pytest.mark.parametrize("offset", [32, 2**40, 2**64 - 32])
def test_offset_past_the_end(tmp_path, offset):
    refused(tmp_path, gguf_bytes({}, one(offset=offset)), "'t'", "the file ends at")


def test_misaligned_offset(tmp_path):
    refused(tmp_path, gguf_bytes({}, one(offset=4, data=bytes(64))), "'t'", "multiple of 32")


def test_overlapping_tensors(tmp_path):
    tensors = {**one("first", data=bytes(64), shape=(2, 8)), **one("second", offset=32)}
    refused(tmp_path, gguf_bytes({}, tensors), "'first'", "'second'", "overlap")


def test_random_damage_is_refused_or_read(tmp_path):
    """Whatever bytes change, a file parses or is refused; nothing else is ever raised."""
    generator, outcomes = random.Random(0), {True: 0, False: 0}
    for _ in range(800):
        data = bytearray(SOUND)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data) if generator.random() < 0.3 else 700)] = generator.choice(
                (0, 1, 2, 8, 9, 0x7F, 0x80, 0xFF, generator.randrange(256))
            )
        if generator.random() < 0.2:
            del data[generator.randrange(len(data)) :]
        outcomes[survives(tmp_path, bytes(data))] += 1
    assert min(outcomes.values()) > 80


def survives(tmp_path, data):
    try:
        file = parse(tmp_path, data)
        for value in file.metadata.values():
            if isinstance(value, Strings):
                assert len(value.tolist()) == len(value)
    except BadModelFile:
        return False
    for name, info in file.tensors.items():
        assert file.raw(name).nbytes == info.nbytes
    return True
