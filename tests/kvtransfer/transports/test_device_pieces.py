"""Pieces of blocks of a GPU, converted with their digests: in Triton's interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.kv_routes import kv_routes, within
from diptych.engine.parallel.kv_shares import KVShare
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.device_pieces import DigestedPieces
from kvtransfer.transports.held_blocks import Pieces

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from kernels.gpu.launch import INTERPRETED

LAYOUT = KVLayout(num_layers=3, num_kv_heads=3, head_dim=8, block_size=4, dtype=torch.bfloat16)
LATENT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=12, block_size=4, dtype=torch.bfloat16, latent=True)
REF = GrantRef(("r", 1), 3, 17)
IDS, PLACES = [4, 1], [0, 5]


def share(layers: tuple[int, int], heads: tuple[int, int]) -> KVShare:
    return KVShare(range(*layers), range(*heads))


TWO = (share((0, 3), (0, 1)), share((0, 3), (1, 3)))
THREE = tuple(share((0, 3), (head, head + 1)) for head in range(3))
STAGES = (share((0, 1), (0, 3)), share((1, 3), (0, 3)))
LATENT_STAGES = (share((0, 2), (0, 1)), share((2, 3), (0, 1)))
WHOLE_LATENT = (share((0, 3), (0, 1)),)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 was not set before Triton was imported")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("no CUDA device, or Triton is in its interpreter")
    return torch.device(request.param)


def memory(layout: KVLayout, held: KVShare, device: torch.device) -> KVMemory:
    return KVMemory.on_device(held.narrow(layout), 6, device)


def hashes(
    made: KVMemory, ids: Sequence[int], pieces: Pieces, first: int = 0, ref: GrantRef = REF
) -> list[bytes]:
    digests = DigestedPieces(made, ids, pieces, ref, first)
    digests.launch()
    if made.device.type == "cuda":
        torch.cuda.synchronize()
    return digests.hashes()


@pytest.mark.parametrize(
    ("layout", "senders", "receivers"),
    [
        (LAYOUT, TWO, THREE),
        (LAYOUT, THREE, TWO),
        (LAYOUT, STAGES, TWO),
        (LAYOUT, TWO, STAGES),
        (LATENT, WHOLE_LATENT, LATENT_STAGES),
    ],
    ids=["2-3", "3-2", "1x2-2", "2-1x2", "latent"],
)
def test_pieces_are_cut_by_index_and_both_ends_find_one_hash(
    layout: KVLayout, senders: Sequence[KVShare], receivers: Sequence[KVShare], device: torch.device
) -> None:
    """Uneven heads, and layers: whoever holds them."""
    torch.manual_seed(3)
    whole = torch.randn(6, *layout.block_shape).to(layout.dtype).to(device)
    sources = [memory(layout, held, device) for held in senders]
    targets = [memory(layout, held, device) for held in receivers]
    for held, source in zip(senders, sources, strict=True):
        source.data.copy_(held.of(whole))
    routes = kv_routes([(held,) for held in senders], [(held,) for held in receivers])
    for (source, target), pieces in routes.items():
        own = [within(piece, senders[source]) for piece in pieces]
        theirs = [within(piece, receivers[target]) for piece in pieces]
        copy = DigestedPieces(sources[source], IDS, own, REF, 0)
        copy.launch(targets[target], PLACES, theirs)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert copy.hashes() == hashes(targets[target], PLACES, theirs)
    for held, target in zip(receivers, targets, strict=True):
        for block, place in zip(IDS, PLACES, strict=True):
            assert torch.equal(target.data[place], held.of(whole[block]))
            if layout is LAYOUT:
                off = held.of(whole[block].roll(1, dims=-2))
                assert not torch.equal(target.data[place], off), "the control: heads off by one"
        assert not bool(target.data[[1, 2, 3, 4]].any()), "no other block is written"


def test_a_hash_knows_grant_index_and_every_bit_and_writes_nothing(device: torch.device) -> None:
    torch.manual_seed(4)
    made = memory(LAYOUT, TWO[1], device)
    made.data.copy_(torch.randn(made.data.shape))
    before, pieces = made.data.clone(), [share((0, 3), (0, 2))]
    found = hashes(made, [2], pieces)
    assert torch.equal(made.data, before)
    assert hashes(made, [2], pieces, first=1) != found
    assert hashes(made, [2], pieces, ref=REF._replace(generation=18)) != found
    made.data[2, 1, 0, 1, 5] += 1
    assert hashes(made, [2], pieces) != found
