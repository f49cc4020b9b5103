"""Bits of packed codes, written out."""

import pytest
import torch

from quant.packing import pack_int4, pack_nibbles, unpack_int4, unpack_nibbles


def test_nibbles_lowest_first():
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0]], dtype=torch.uint8)
    assert pack_nibbles(codes).numpy().tobytes() == bytes.fromhex("21 43 65 87 a9 cb ed 0f")


def test_int4_words_are_biased_by_eight_and_lowest_first():
    codes = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.int8)
    packed = pack_int4(codes)
    assert packed.dtype is torch.int32
    assert [word & 0xFFFFFFFF for word in packed[0].tolist()] == [0x76543210, 0xFEDCBA98]


def test_a_partial_word_ends_in_zero_bits():
    assert pack_int4(torch.tensor([[7, -8, 1]], dtype=torch.int8)).tolist() == [[0x90F]]


@pytest.mark.parametrize("columns", [2, 6, 8, 30, 64])
def test_nibbles_invert(columns):
    codes = torch.arange(5 * columns, dtype=torch.int32).remainder(16).to(torch.uint8).reshape(5, columns)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 64])
def test_int4_inverts(columns):
    codes = (torch.arange(5 * columns).remainder(16) - 8).to(torch.int8).reshape(5, columns)
    assert torch.equal(unpack_int4(pack_int4(codes), columns), codes)


def test_codes_need_not_be_contiguous():
    codes = torch.arange(64, dtype=torch.int32).remainder(16).to(torch.uint8).reshape(8, 8)
    assert torch.equal(pack_nibbles(codes.T), pack_nibbles(codes.T.contiguous()))
