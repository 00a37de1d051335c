"""The exchange of ranks that compute on GPUs, one device a rank: torch.distributed's NCCL.

Written against torch's documentation. No machine with two GPUs was at hand: it has never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d as c10d

from diptych.engine.parallel.communicator import GroupBroken, exchange_rows
from diptych.engine.parallel.gloo_communicator import BUILD_S
from diptych.engine.parallel.torch_groups import first_line


class NcclCommunicator:
    """A rank's end of an NCCL group. Its calls are queued on the device's current stream, as products are,
    and may be captured in a CUDA graph as these are.
    """

    on_device = True

    def __init__(self, store: c10d.Store, rank: int, ranks: int, device: torch.device) -> None:
        """Join the group at `store` with `device`; returns when all ranks have, and exchanged numbers.

        Raises GroupBroken.
        """
        self.rank, self.ranks = rank, ranks
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=BUILD_S)
        self._how = AllgatherOptions()
        self._rows = c10d.AllToAllOptions()
        # On the current stream, and not on one of the library's.
        self._how.asyncOp = self._rows.asyncOp = False
        try:
            with torch.cuda.device(device):
                self._group: Any = c10d.ProcessGroupNCCL(store, rank, ranks, options)
                # Connections are made by the first exchange, which no graph can hold.
                met = self.all_gather(torch.tensor([rank], device=device)).flatten().tolist()
        except RuntimeError as error:
            raise GroupBroken(f"rank {rank} of {ranks} found no group: {first_line(error)}") from error
        if met != list(range(ranks)):
            raise GroupBroken(f"rank {rank} of {ranks} met {met}")

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_gather`."""
        everything = own.new_empty((self.ranks, *own.shape))
        try:
            # Queued: the stream waits for the others, and the host does not.
            self._group._allgather_base(everything, own.contiguous(), self._how).wait()
        except RuntimeError as error:
            raise GroupBroken(f"a rank did not answer: {first_line(error)}") from error
        return everything

    def gather(self, own: torch.Tensor) -> torch.Tensor | None:
        """See `Communicator.gather`."""
        everything = self.all_gather(own)  # NCCL has no gather of its own
        return everything if self.rank == 0 else None

    def all_to_all(
        self, own: Sequence[torch.Tensor], rows: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """See `Communicator.all_to_all`. The host waits for the sizes where they are not known."""
        return exchange_rows(self, own, rows, self._exchange)

    def _exchange(self, came: torch.Tensor, sent: torch.Tensor, coming: list[int], going: list[int]) -> None:
        """Queue an exchange of rows; see `communicator.Exchange`."""
        try:
            self._group.alltoall_base(came, sent, coming, going, self._rows).wait()
        except RuntimeError as error:
            raise GroupBroken(f"a rank did not answer: {first_line(error)}") from error
