import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilinear.encrypted import Parameters
from multilinear.encrypted.network import directions, shift
from multilinear.encrypted.packing import PACKINGS, Packing
from multilinear.errors import MultilinearError

MOVES = directions(4)


@st.composite
def packings(draw, kinds=PACKINGS):
    grid = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return Packing(draw(st.sampled_from(kinds)), grid, draw(st.integers(36, 150)))


def draw_tokens(data, packing, channels):
    """Some images, often as many as there is room for."""
    count = data.draw(st.integers(1, packing.images) | st.just(packing.images))
    return np.random.default_rng(count).normal(size=(count, *packing.grid, channels))


@given(packings(), st.integers(1, 3), st.data())
@settings(deadline=None, max_examples=150)
def test_unpacking_is_the_inverse_of_packing(packing, channels, data):
    tokens = draw_tokens(data, packing, channels)
    packed = packing.pack(tokens)
    assert packed.shape == (packing.places, channels, packing.slots)
    assert np.array_equal(packing.unpack(packed, len(tokens)), tokens)
    assert np.count_nonzero(packed) == tokens.size
    fewer = max(1, len(tokens) // 2)
    assert np.array_equal(packing.unpack(packed, fewer), tokens[:fewer])


def moved(tokens, move):
    """Only the channel of a four-channel shift that moves as `move`, done to every channel."""
    channels = tokens.shape[-1]
    spread = np.repeat(tokens[..., None], 4, -1).reshape(*tokens.shape[:3], 4 * channels)
    order = np.argsort(np.tile(np.arange(4), channels), kind="stable")
    return shift(spread[..., order]).reshape(*tokens.shape[:3], 4, channels)[..., MOVES.index(move), :]


@given(packings(["tokens"]), st.sampled_from(MOVES), st.data())
@settings(deadline=None, max_examples=150)
def test_a_rotation_is_the_shift_once_masked(packing, move, data):
    tokens = draw_tokens(data, packing, 2)
    turned = np.roll(packing.pack(tokens), -packing.steps(move), -1)
    wanted = moved(tokens, move)
    assert np.array_equal(packing.unpack(turned, len(tokens)), wanted)
    assert np.array_equal(turned * packing.pack(np.ones((len(tokens), *packing.grid, 1)))[0, 0], packing.pack(wanted))


@given(packings(["images"]), st.sampled_from(MOVES), st.data())
@settings(deadline=None, max_examples=100)
def test_with_one_ciphertext_a_token_the_shift_renames_them(packing, move, data):
    tokens = draw_tokens(data, packing, 2)
    packed = packing.pack(tokens)
    sources = [packing.source(place, move) for place in range(packing.places)]
    renamed = np.stack([np.zeros_like(packed[0]) if source is None else packed[source] for source in sources])
    assert np.array_equal(renamed, packing.pack(moved(tokens, move)))


@given(packings())
@settings(deadline=None, max_examples=100)
def test_the_mask_is_one_where_tokens_are_and_zero_elsewhere(packing):
    mask = packing.mask()
    assert mask.shape == (packing.slots,) and set(mask.tolist()) <= {0.0, 1.0}
    full = packing.pack(np.ones((packing.images, *packing.grid, 1)))
    assert all(np.array_equal(mask, place[0]) for place in full)
    per_place = packing.grid[0] * packing.grid[1] // packing.places
    assert mask.sum() == packing.images * per_place


@given(packings(["tokens"]))
@settings(deadline=None, max_examples=50)
def test_there_is_a_key_for_every_rotation(packing):
    assert sorted(packing.rotations()) == sorted(packing.steps(move) for move in MOVES)


def test_one_ciphertext_a_token_needs_no_rotation():
    packing = Packing.make("images", (3, 4), Parameters(8192, 2))
    assert packing.rotations() == [] and packing.images == 4095 and packing.places == 12


def test_an_unknown_packing_is_refused():
    with pytest.raises(MultilinearError, match="unknown packing 'rows'; known: images, tokens"):
        Packing.make("rows", (2, 2), Parameters(8192, 2))
