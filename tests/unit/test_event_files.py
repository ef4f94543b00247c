"""Event files: the records that tf.summary writes, written without TensorFlow."""

from __future__ import annotations

import gc
import io
import json
import logging
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import replicax as rx
from replicax.tensorflow_files import records, wire
from replicax.tensorflow_files.events import (
    Event,
    EventWriter,
    bucket_counts,
    encode_png,
    read_events,
)

FILES = Path(__file__).parent.parent / "fixtures" / "tensorflow"
FACTS: dict[str, Any] = json.loads((FILES / "expected.json").read_text())
THEIRS = FILES / "events" / "summary.tfevents"


def values(shape: tuple[int, ...]) -> np.ndarray:
    return (np.arange(np.prod(shape)) / 8).reshape(shape).astype(np.float32)


def write_like_the_fixture(folder: Path) -> Path:
    with EventWriter(folder) as writer:
        for step in range(3):
            writer.scalar("loss", 0.5 * step, step)
        writer.histogram("weights", values((100,)), 2, buckets=5)
        writer.histogram("constant", np.ones(4, np.float32), 2, buckets=5)
        writer.histogram("empty", np.zeros(0, np.float32), 2, buckets=5)
        writer.text("note", "hello", 2)
        writer.image("pixels", values((2, 3, 4, 1)) / 3, 2, max_outputs=1)
    return writer.path


def summaries(path: Path) -> list[tuple[int, bytes]]:
    """Step and serialized summary of each event but the first."""
    found = []
    for record in list(records.read_records(path))[1:]:
        parts = {number: value for number, _, value in wire.fields(record)}
        found.append((wire.as_signed(parts.get(2, 0)), wire.as_bytes(parts[5])))
    return found


def test_summaries_have_the_bytes_of_tensorflow(tmp_path: Path) -> None:
    ours = summaries(write_like_the_fixture(tmp_path))
    theirs = summaries(THEIRS)
    # PNG files differ in their compression; the test below compares the pixels.
    assert ours[:-1] == theirs[:-1] and len(ours) == len(theirs) == 8


def test_images_have_the_pixels_of_tensorflow(tmp_path: Path) -> None:
    def image(path: Path) -> tuple[bytes, bytes, list[int]]:
        tensor = list(read_events(path))[-1].values[0].tensor
        return tensor[0], tensor[1], list(Image.open(io.BytesIO(tensor[2])).tobytes())

    assert image(write_like_the_fixture(tmp_path)) == image(THEIRS)


def test_events_of_tensorflow_are_read() -> None:
    first, *events = read_events(THEIRS)
    assert first.file_version == "brain.Event:2" and first.wall_time > 1e9
    loss = [(e.step, float(v.tensor)) for e in events for v in e.values if v.tag == "loss"]
    assert loss == [(0, 0.0), (1, 0.5), (2, 1.0)]
    plugins = {v.tag: v.plugin for e in events for v in e.values}
    assert plugins == {
        "loss": "scalars", "weights": "histograms", "constant": "histograms",
        "empty": "histograms", "note": "text", "pixels": "images",
    }  # fmt: skip
    for tag in ("weights", "constant", "empty"):
        (found,) = [v.tensor for e in events for v in e.values if v.tag == tag]
        assert found.tolist() == FACTS[f"histogram {tag}"]


def test_summaries_of_tensorflow_1_are_read(tmp_path: Path) -> None:
    value = wire.text(1, "loss") + wire.single(2, 0.5)
    event = wire.number(2, 7) + wire.octets(5, wire.octets(1, value))
    (tmp_path / "a").write_bytes(records.framed(event))
    (found,) = read_events(tmp_path / "a")
    assert found.step == 7 and float(found.values[0].tensor) == 0.5


def test_each_writer_has_a_file_that_tensorboard_finds(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "a" / "run") as one, EventWriter(tmp_path / "a" / "run") as other:
        assert one.path != other.path
        assert one.path.name.startswith("events.out.tfevents.") and one.path.name.endswith(".v2")
    assert [event.file_version for event in read_events(one.path)] == ["brain.Event:2"]


def last(path: Path) -> Event:
    return list(read_events(path))[-1]


def test_flushes_by_count_by_time_and_on_request(tmp_path: Path) -> None:
    def count(writer: EventWriter) -> int:
        return len(list(read_events(writer.path))) - 1

    with EventWriter(tmp_path, max_queue=3) as writer:
        for step in range(4):
            assert count(writer) == (0 if step < 3 else 3)
            writer.scalar("a", step, step)
        writer.flush()
        assert count(writer) == 4
    with EventWriter(tmp_path, flush_seconds=0) as writer:
        writer.scalar("a", 1, 1)
        assert count(writer) == 1
    writer = EventWriter(tmp_path)
    writer.scalar("a", 1, 1)
    path = writer.path
    del writer
    gc.collect()
    assert last(path).step == 1


def test_threads_may_share_a_writer(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as writer:
        threads = [
            threading.Thread(target=lambda: [writer.scalar("a", i, i) for i in range(50)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(list(read_events(writer.path))) == 201


def test_values_of_jax_and_steps_of_any_integer_type(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as writer:
        writer.scalar("a", jnp.bfloat16(1.5), jnp.int32(2**31 - 1), description="about a")
        writer.histogram("h", jnp.arange(6.0).reshape(2, 3), np.int64(3), buckets=2)
        writer.scalar("b", True, step=-1)
        writer.text("t", [["a", "b"], ["c", "d"]], 4)
    _, a, h, b, t = read_events(writer.path)
    assert (a.step, float(a.values[0].tensor)) == (2**31 - 1, 1.5)
    assert a.values[0].description == "about a"
    assert h.values[0].tensor.tolist() == [[0.0, 2.5, 3.0], [2.5, 5.0, 3.0]]
    assert (b.step, float(b.values[0].tensor)) == (-1, 1.0)
    assert t.values[0].tensor.tolist() == [[b"a", b"b"], [b"c", b"d"]]


def test_histograms_leave_out_what_is_not_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EventWriter(tmp_path) as writer, caplog.at_level(logging.WARNING):
        writer.histogram("h", [1.0, np.nan, 3.0, -np.inf], 0, buckets=2)
    assert "leaves out 2 values" in caplog.text
    assert last(writer.path).values[0].tensor.tolist() == [[1.0, 2.0, 1.0], [2.0, 3.0, 1.0]]
    assert bucket_counts(np.ones(3), 0).shape == (0, 3)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "LA"), (3, "RGB"), (4, "RGBA")])
def test_png_files_hold_the_pixels(channels: int, mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels)).astype(np.uint8)
    image = Image.open(io.BytesIO(encode_png(pixels)))
    assert image.mode == mode and image.size == (7, 5)
    np.testing.assert_array_equal(np.asarray(image).reshape(pixels.shape), pixels)


def test_images_are_clipped_and_counted(tmp_path: Path) -> None:
    with EventWriter(tmp_path) as writer:
        writer.image("i", np.array([-1.0, 0.5, 2.0, np.nan]).reshape(1, 1, 4, 1), 0)
        writer.image("many", np.zeros((5, 2, 3, 3), np.uint8), 0)
    _, i, many = read_events(writer.path)
    pixels = Image.open(io.BytesIO(i.values[0].tensor[2])).tobytes()
    assert list(pixels) == [0, 127, 255, 0]
    assert many.values[0].tensor.tolist()[:2] == [b"3", b"2"]
    assert many.values[0].tensor.shape == (5,)


def test_mistakes_are_explained(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    with pytest.raises(rx.errors.InvalidArgumentError, match=r"one real number, but .*\(2,\)"):
        writer.scalar("a", [1.0, 2.0], 0)
    with pytest.raises(rx.errors.InvalidArgumentError, match="needs a step"):
        writer.scalar("a", 1.0, None)  # type: ignore[arg-type]
    with pytest.raises(rx.errors.InvalidArgumentError, match="whole number"):
        writer.scalar("a", 1.0, 1.5)  # type: ignore[arg-type]
    with pytest.raises(rx.errors.InvalidArgumentError, match=r"image\[None\]"):
        writer.image("a", np.zeros((2, 3, 3)), 0)
    with pytest.raises(rx.errors.ArgumentTypeError, match="uint8"):
        writer.image("a", np.zeros((1, 2, 3, 3), np.int32), 0)
    writer.close()
    writer.close()
    writer.flush()
    with pytest.raises(rx.errors.ContextError, match="closed"):
        writer.scalar("a", 1.0, 0)
    assert len(list(read_events(writer.path))) == 1


def test_damaged_events_are_found(tmp_path: Path) -> None:
    data = THEIRS.read_bytes()
    (tmp_path / "a").write_bytes(data[:-3])
    with pytest.raises(rx.errors.DataLossError):
        list(read_events(tmp_path / "a"))
    (tmp_path / "b").write_bytes(records.framed(b"\xff"))
    with pytest.raises(rx.errors.DataLossError, match="not an event"):
        list(read_events(tmp_path / "b"))
