"""The stand-ins for the programs' edges to the outside during a run.

The product's code runs as it is; only its edges are replaced: clocks, chance, process ids, channels and
servers, sockets, shared memory, Redis, the engine's arithmetic, HTTP and metrics.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.metrics import new_registry
from diptych.runtime.worker_metrics import DecodeMetrics, EncodeMetrics, PrefillMetrics
from diptych.worker_process.group import share_pushes
from kvtransfer.transports import registry, shared_memory, tcp_by_rank
from kvtransfer.transports.pool_memory import PoolMemory
from prefill_worker.scratch_memory import ScratchPlan
from tests.simulation import model, tiers
from tests.simulation.images import located
from tests.simulation.in_place import InPlaceReceiver
from tests.simulation.network import Server
from tests.simulation.share_group import make_share_memory
from tests.simulation.sockets import SimulatedSocket
from tests.simulation.store import StoreClient
from tests.simulation.thread_sockets import ThreadSockets
from tests.simulation.virtual_loop import current_host

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

_METRICS = {
    "DecodeMetrics": DecodeMetrics(new_registry()),
    "GatewayMetrics": GatewayMetrics(new_registry()),
    "PrefillMetrics": PrefillMetrics(new_registry()),
    "EncodeMetrics": EncodeMetrics(new_registry()),
}
_THREADED = (
    *("holder_program", "queued_sender", "remote_rank", "share_arrivals"),
    *("share_link", "share_memory", "share_pushes", "share_service"),
)
"""Modules of diptych/worker_process/group whose threads wait."""
_KEPT_BYTES = 400
_make_receiver = registry.make_receiver
_NO_FILE = -1
"""Descriptor of a pool's file: simulated processes map pools without one."""


@contextlib.contextmanager
def installed_stand_ins(cluster: Cluster) -> Iterator[None]:
    """Replace the edges for the time of one run."""
    with contextlib.ExitStack() as stack:
        for target, stand_in in _stand_ins(cluster).items():
            module, _, name = target.rpartition(".")
            owner = importlib.import_module(module)
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, stand_in)
        handler = _Errors(cluster.failed)
        root = logging.getLogger()
        handlers, disabled = root.handlers[:], logging.root.manager.disable
        root.handlers[:] = [handler]
        logging.disable(logging.WARNING)
        stack.callback(logging.disable, disabled)
        stack.callback(root.handlers.__setitem__, slice(None), handlers)
        yield


class _Errors(logging.Handler):
    """A handler that reports every logged error with a traceback: a bug that the program survived."""

    def __init__(self, failed: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.ERROR)
        self._failed = failed

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self._failed({"message": f"{record.name}: {record.getMessage()}", "exception": error})


def _stand_ins(cluster: Cluster) -> Mapping[str, Any]:
    chance = random.Random(f"chance {cluster.scenario.network}")
    network, threads = cluster.network, tiers.Threads(cluster)
    found: dict[str, Any] = {
        "time.monotonic": cluster.loop.time,
        "os.getpid": _pid,
        "secrets.token_hex": lambda size=16: chance.randbytes(size).hex(),
        "secrets.token_bytes": lambda size=16: chance.randbytes(size),
        "secrets.randbits": chance.getrandbits,
        "diptych.runtime.rpc_streams.grpc_stream.make_channel": network.channel,
        "diptych.runtime.rpc_streams.unix_stream.connect": _no_unix_socket,
        "diptych.runtime.discovery.store.connect": lambda url: StoreClient(cluster.store),
        "kvtransfer.drivers.server.make_receiver": _receiver_maker(cluster),
        "kvtransfer.transports.registry.map_pool": cluster.shared_pools.open,
        "kvtransfer.transports.row_region.PoolFdSocket": cluster.row_regions.listen,
        "kvtransfer.transports.row_region.register": cluster.row_regions.register,
        "kvtransfer.transports.row_registry.host_id": cluster.row_regions.host_id,
        "kvtransfer.transports.data_connection.socket": SimpleNamespace(
            socket=SimulatedSocket, SOCK_STREAM=1, IPPROTO_TCP=6, TCP_NODELAY=1, SHUT_RDWR=2
        ),
        "diptych.worker_process.group.share_arrivals.KEPT_BYTES": _KEPT_BYTES,
        "diptych.worker_process.group.holder_program.ShareMemory": make_share_memory,
        "diptych.worker_process.group.holder_program.leave": cluster.leave_rank,
        "kvtransfer.transports.registry.ByRankReceiver": cluster.shares.watched_receiver,
        "decode_worker.pool_memory.allocate_pool": _pool_memory,
        "decode_worker.worker.rank_statuses": lambda group: (),
        "prefill_worker.worker.rank_statuses": lambda group: (),
        "decode_worker.worker.BlockPool": cluster.decode_pool,
        "decode_worker.drafters.PromptLookup": model.SimulatedDrafter,
        "prefill_worker.worker.BlockPool": cluster.scratch_pool,
        "prefill_worker.worker.plan_scratch": _small_scratch,
        "decode_worker.worker.AdapterStore": model.SimulatedAdapterStore,
        "prefill_worker.worker.AdapterStore": model.SimulatedAdapterStore,
        "gateway.program.read_configured": lambda given, max_rank: (
            list(model.ADAPTERS.values()) if cluster.scenario.max_loras else []
        ),
        "diptych.worker_process.kv_tiers.ThreadPoolExecutor": threads.executor,
        "diptych.worker_process.tier_loads.ThreadPoolExecutor": threads.executor,
        "diptych.worker_process.kv_tiers.threading": SimpleNamespace(Event=threads.event),
        "diptych.worker_process.kv_tiers.RESCAN_S": tiers.RESCAN_S,
        "gateway.request.validation._located": located,
        "decode_worker.choices.sample": model.sample,
        "diptych.worker_process.prompt_chunk.sample": model.sample,
        "diptych.worker_process.server.leave": _leave,
        "diptych.worker_process.server.announce_ready": lambda settings, ports, record: None,
        "gateway.listeners.AdminServicer": SimpleNamespace(start=_nothing_started),
        "gateway.listeners.OpenAIRoutes": lambda *args, **options: None,
        "gateway.listeners.KServeServicer": lambda *args, **options: SimpleNamespace(
            register=lambda server: None
        ),
    }
    for sender in (tcp_by_rank, share_pushes):
        found[f"{sender.__name__}.read_pieces"] = cluster.shares.watched_read(sender.read_pieces)
        found[f"{sender.__name__}.share_digest"] = cluster.shares.watched_digest(sender.share_digest)
    for name in _THREADED:
        module = importlib.import_module(f"diptych.worker_process.group.{name}")
        threaded = {"threading": cluster.threads.threading, "queue": cluster.threads.queue}
        threaded["socket"] = ThreadSockets(cluster.threads, cluster.sockets)
        found |= {f"{module.__name__}.{used}": threaded[used] for used in threaded if hasattr(module, used)}
    for module in (
        "gateway.program",
        "decode_worker.worker",
        "prefill_worker.worker",
        "prefill_worker.encoder.worker",
        "diptych.worker_process.server",
    ):
        found[f"{module}.incarnation"] = _incarnation
    for module in ("decode_worker.worker", "prefill_worker.worker"):
        found[f"{module}.make_stack"] = tiers.stack_maker(cluster)
    workers = ("decode_worker.worker", "prefill_worker.worker", "prefill_worker.encoder.worker")
    for module in ("gateway.program", *workers):
        found[f"{module}.new_registry"] = CollectorRegistry
    for module, name in (
        ("gateway.program", "GatewayMetrics"),
        ("decode_worker.worker", "DecodeMetrics"),
        ("prefill_worker.worker", "PrefillMetrics"),
        ("prefill_worker.encoder.worker", "EncodeMetrics"),
    ):
        found[f"{module}.{name}"] = lambda registry, shared=_METRICS[name]: shared
    for module in ("gateway.listeners", "diptych.worker_process.server"):
        found |= {
            f"{module}.make_server": lambda **options: Server(network, _host()),
            f"{module}.bind": _binder(cluster),
            f"{module}.add_health_and_reflection": _health,
            f"{module}.HttpEdge": SimpleNamespace(start=_nothing_started),
        }
    found["diptych.worker_process.server.UnixServer"] = lambda services: SimpleNamespace(
        open=_nothing, close=_nothing
    )
    SimulatedSocket.network = cluster.sockets
    return found


def _host() -> Any:
    host = current_host.get()
    if host is None:
        raise RuntimeError("no simulated process runs here")
    return host


def _incarnation() -> int:
    return _host().incarnation  # type: ignore[no-any-return]


def _leave(status: int) -> None:
    """Raise: the test process must not exit."""
    raise RuntimeError(f"{_host()} leaves with status {status}")


def _pid() -> int:
    """Return the simulated process' id: it is sent in messages, whose lengths are in the trace."""
    host = current_host.get()
    return 0 if host is None else host.incarnation


def _pool_memory(layout: KVLayout, num_blocks: int) -> PoolMemory:
    return PoolMemory(KVMemory(layout, num_blocks), _NO_FILE)


def _small_scratch(configured: int, transports: Sequence[str], *_: object) -> ScratchPlan:
    """Plan scratch that holds less than a context: decode pools bound the prompts, and room gets short."""
    return ScratchPlan(configured, tuple(transports))


def _receiver_maker(cluster: Cluster) -> Callable[..., Any]:
    def make(name: str, memory: PoolMemory, host: str, hooks: Any, tls: Any) -> Any:
        if name == shared_memory.NAME:
            return InPlaceReceiver(cluster.shared_pools, memory, hooks)
        return _make_receiver(name, memory, host, hooks, tls)

    return make


def _binder(cluster: Cluster) -> Callable[..., int]:
    def bind(server: Server, host: str, port: int, insecure: bool, credentials: object = None) -> int:
        bound = cluster.port_of(server.host)
        server.address = f"{host}:{bound}"
        return bound

    return bind


async def _health(server: object, names: object) -> Any:
    async def set_ready(ready: bool) -> None:
        pass

    return SimpleNamespace(set_ready=set_ready)


async def _no_unix_socket(address: str, method: object) -> None:
    """Return no connection: every host is a machine of its own."""


async def _nothing(*_: object) -> None:
    pass


async def _nothing_started(*_: object, **__: object) -> Any:
    async def close() -> None:
        pass

    return SimpleNamespace(port=0, close=close)
