"""What of a step's numbers is sent to a device: a device that holds nothing stands in for one."""

from __future__ import annotations

import pytest

from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.batch import BatchBuffers, BufferShape
from quire.engine.buffers import Buffer, DirectUploader, TableBuffer
from quire.kernels.arrays import NumpyArrays
from quire.kernels.torch_arrays import TorchArrays

pytestmark = pytest.mark.cpu

NOWHERE = TorchArrays("meta")
HOST = NumpyArrays()


class Noted(DirectUploader):
    """Records what is added."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.added: list[tuple[int, int, int | None]] = []

    def add(self, source, target, first, last, width=None) -> None:
        self.added.append((first, last, width))

    def take(self) -> list[tuple[int, int, int | None]]:
        taken, self.added = self.added, []
        return taken


def test_a_table_sends_rows_that_changed_as_wide_as_they_are():
    uploader = Noted()
    tables = TableBuffer(8, 100, NOWHERE, uploader)
    for row in range(6):
        tables.fill(row, [*range(1, 4 + row)])
    tables.upload(6, 100)
    assert uploader.take() == [(0, 6, 8)]
    tables.fill(2, [*range(1, 6)])
    tables.upload(6, 100)
    assert uploader.take() == []  # nothing has changed
    tables.fill(2, [*range(1, 8)])
    tables.fill(4, [5, 6])
    tables.upload(6, 100)
    assert uploader.take() == [(2, 5, 7)]
    assert tables.buffer.host[2, :7].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tables.buffer.host[4, :2].tolist() == [5, 6]


@pytest.mark.parametrize("num_blocks", [1, 15, 16, 93, 100])
def test_selected_rows_of_a_table_keep_a_stride_that_kernels_are_compiled_for(num_blocks):
    tables = TableBuffer(8, 100, HOST, DirectUploader(HOST))
    for row in range(4):
        tables.fill(row, [*range(1, num_blocks + 1)])
    selected = tables.upload(4, num_blocks)[[3, 1]]
    assert selected.strides[0] % 64 == 0
    assert selected[:, :num_blocks].tolist() == [[*range(1, num_blocks + 1)]] * 2


def test_a_buffer_on_the_host_is_never_sent():
    uploader = Noted()
    buffer = Buffer((9,), "int32", HOST, uploader)
    buffer.host[:3] = 1, 2, 3
    assert buffer.upload(3).tolist() == [1, 2, 3]
    assert uploader.take() == []
    far = Buffer((9,), "int32", NOWHERE, uploader)
    assert far.upload(4).shape == (4,)
    assert uploader.take() == [(0, 4, None)]


def test_blocks_of_the_encoder_and_of_states_come_after_those_that_grow():
    shape = BufferShape(8, 4, 16, (None, 5), 4, 100, HOST, num_fixed_groups=2)
    requests = [Request("a", [1, 2], encoder_tokens=range(7)), Request("b", [3])]
    for request, tables, fixed in zip(
        requests, ([[1], [2]], [[3], [4]]), ([[5, 6], [7]], [[], [8]]), strict=True
    ):  # fmt: skip
        request.tables, request.fixed_tables = tables, fixed
    paging = BatchBuffers(shape).fill(Plan(1, requests, [0, 0], [2, 1], [1, 1])).paging
    assert [table[:, :2].tolist() for table in paging.block_tables] == [
        [[1, 0], [3, 0]], [[2, 0], [4, 0]], [[5, 6], [0, 0]], [[7, 0], [8, 0]],
    ]  # fmt: skip
    assert paging.encoder_lens is not None
    assert paging.encoder_lens.tolist() == [7, 0]
    assert len(paging.slot_mapping) == 2


def test_after_a_reset_every_table_is_uploaded_again() -> None:
    """An upload that was queued may never have been sent."""
    table = TableBuffer(2, 4, HOST, DirectUploader(HOST))
    table.fill(0, [1, 2, 3])
    table.upload(1, 4)
    table.fill(0, [1, 2, 3])
    assert not table._changed
    table.reset()
    table.fill(0, [1, 2, 3])
    assert table._changed == [0]
