"""The models of a gateway by the names that requests use: of models, of their adapters, and aliases.

A name is looked up once, when a request comes; the request then holds its core. What changes here later
leaves it alone: a model that lost its name serves its requests to their end, and is then forgotten.

Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from diptych.runtime.errors import InvalidParameter, UnknownAdapter, UnknownModel
from gateway.access.access import Caller
from gateway.model.aliases import BadAlias, ModelAlias, Share, check_targets, sticky_point
from gateway.model.small_requests import SmallRequests
from gateway.served_models.core import ModelCore, Neighbours
from gateway.served_models.loading import LoadedModel

MakeCore = Callable[[LoadedModel, Neighbours], ModelCore]
_log = logging.getLogger(__name__)


class ModelDirectory:
    """Models, the first of which answers where none is named, and aliases.

    Args:
        make_core: makes the core of a model.
        on_change: called when a model, or workers of one, came, went or changed.
    """

    def __init__(self, make_core: MakeCore, on_change: Callable[[], None]) -> None:
        self._make_core = make_core
        self._on_change = on_change
        self._served: tuple[ModelCore, ...] = ()
        self._coming: tuple[ModelCore, ...] = ()  # that are to take a name when they are ready
        self._leaving: tuple[ModelCore, ...] = ()  # that have no name any more, and serve what runs
        self._aliases: dict[str, ModelAlias] = {}
        self._small: dict[str, SmallRequests] = {}
        self._strangers: set[tuple[str, int]] = set()

    # --- what there is --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ModelCore]:
        """Iterate over what is served, in the order in which it came."""
        return iter(self._served)

    def __len__(self) -> int:
        return len(self._served)

    @property
    def first(self) -> ModelCore:
        """Return the model that answers for all where none is named."""
        return self._served[0]

    @property
    def leaving(self) -> tuple[ModelCore, ...]:
        """Return the models that only running requests keep."""
        return self._leaving

    @property
    def living(self) -> tuple[ModelCore, ...]:
        """Return all models with links to workers: those that come and leave, too."""
        return (*self._served, *self._coming, *self._leaving)

    @property
    def aliases(self) -> list[ModelAlias]:
        return list(self._aliases.values())

    def get(self, name: str) -> ModelCore | None:
        """Return the model of this very name, or of another one of its own; None: there is none."""
        return next((core for core in self._served if core.model.card.answers_to(name)), None)

    def names(self) -> list[str]:
        """Return the names of models and aliases, for people."""
        return [*(core.name for core in self._served), *self._aliases]

    def why_not_ready(self) -> str:
        """Return why no request has workers to run on; empty while one of the models has some."""
        reasons = [core.why_not_ready() for core in self._served]
        if not all(reasons):
            return ""
        if len(reasons) == 1:
            return reasons[0]
        return "; ".join(f"{core.name}: {why}" for core, why in zip(self._served, reasons, strict=True))

    def lacks(self, name: str) -> str:
        """Return why a model, or every model of an alias, has no workers; empty while it has."""
        alias = self._aliases.get(name)
        models = [name] if alias is None else [share.model for share in alias.shares if share.weight]
        reasons = [
            "there is no such model" if core is None else core.why_not_ready()
            for core in map(self.get, models)
        ]
        return "" if not all(reasons) else "; ".join(reasons)

    # --- choice of a request --------------------------------------------------------------------------

    def choose(
        self,
        name: str,
        caller: Caller | None = None,
        *,
        session_id: str = "",
        resume_token: str = "",
        lora: str = "",
        size: Callable[[], int] | None = None,
    ) -> tuple[ModelCore, str]:
        """Return the model that a request names, and the name by which that model knows itself.

        With a single model it is always that one, which refuses other names itself.

        Args:
            caller: whose adapters count; None: all do.
            session_id: requests of one stay with a model of an alias, as long as the shares are the same.
            resume_token: goes on at the model that began.
            lora: adapter that the model of an alias must have.
            size: returns the bytes of the prompt, of requests that another model may answer for it.

        Raises:
            InvalidParameter: there is no name.
            UnknownModel: it stands for nothing here.
        """
        if len(self._served) == 1 and not self._aliases and not self._leaving:
            return self.first, name
        if resume_token and (began := self._began(name, resume_token)) is not None:
            return began, name if began.answers_to(name) else began.name
        if size is not None and (small := self._small_model(name, size)) is not None:
            return small, small.name
        if (core := self.get(name)) is not None:
            return core, name
        if (alias := self._aliases.get(name)) is not None:
            point = sticky_point(name, session_id) if session_id else random.random()
            chosen = self._served_as(alias.choose(point, partial(self._can_answer, lora)))
            return chosen, chosen.name
        if (core := self._with_adapter(name, caller)) is not None:
            return core, name
        if not name:
            raise InvalidParameter("model", "is required")
        raise UnknownModel(name, *self.names())

    def describe(self, name: str, caller: Caller | None = None) -> tuple[ModelCore, str]:
        """Return the model that a call without generation is for; of an alias the one with most weight.

        Raises as `choose`.
        """
        if (alias := self._aliases.get(name)) is not None:
            core = self._served_as(alias.heaviest)
            return core, core.name
        return self.choose(name, caller)

    def _small_model(self, name: str, size: Callable[[], int]) -> ModelCore | None:
        rule = self._small.get(name)
        if rule is None or size() > rule.most_bytes or not self._is_ready(rule.model):
            return None
        return self.get(rule.model)

    def _began(self, name: str, token: str) -> ModelCore | None:
        """Return the model that began a stream, among those that the name stands for or stood for."""
        alias = self._aliases.get(name)
        meant = {name} if alias is None else {name, *(share.model for share in alias.shares)}
        if (small := self._small.get(name)) is not None:
            meant.add(small.model)
        for core in (*self._served, *self._leaving):
            if any(map(core.answers_to, meant)) and core.tokens.began(token):
                return core
        return None

    def _with_adapter(self, name: str, caller: Caller | None) -> ModelCore | None:
        if not name or (caller is not None and not caller.may_use(name)):
            return None
        return next((core for core in self._served if core.adapters.get(name) is not None), None)

    def _served_as(self, name: str) -> ModelCore:
        """Return the model with a name that an alias has: it stays while the alias does."""
        return next(core for core in self._served if core.name == name)

    def _is_ready(self, name: str) -> bool:
        return self._can_answer("", name)

    def _can_answer(self, lora: str, name: str) -> bool:
        core = self.get(name)
        if core is None or core.why_not_ready():
            return False
        return not lora or core.adapters.get(lora) is not None

    # --- adapters -------------------------------------------------------------------------------------

    def for_adapter(self, base: str) -> ModelCore:
        """Return the model that an adapter is to be applied to. Raises InvalidParameter, UnknownModel."""
        if not base and len(self._served) > 1:
            raise InvalidParameter("model", "is required: several models are served")
        core = self.get(base) if base else self.first
        if core is None:
            raise UnknownModel(base, *(one.name for one in self._served))
        return core

    def with_adapter(self, name: str) -> ModelCore:
        """Return the model whose adapter has a name. Raises UnknownAdapter."""
        if (core := self._with_adapter(name, None)) is None:
            raise UnknownAdapter(name)
        return core

    # --- changes --------------------------------------------------------------------------------------

    def make(self, loaded: LoadedModel) -> ModelCore:
        """Return a core that has no name yet. `start` it, then `add` or `discard` it."""
        name = loaded.model.card.name
        neighbours = Neighbours(
            several=lambda: len(self._served) > 1,
            is_served=lambda digest: any(core.digest == digest for core in self.living),
            is_taken=lambda other: self._is_taken(other, besides=name),
            on_change=self._on_change,
            strangers=self._strangers,
        )
        core = self._make_core(loaded, neighbours)
        self._coming += (core,)
        return core

    def add(self, core: ModelCore) -> ModelCore | None:
        """Give a core its name; return the one that had it, which leaves."""
        self._coming = _without(self._coming, core)
        before = next((one for one in self._served if one.name == core.name), None)
        if before is None:
            self._served += (core,)
        else:
            self._served = tuple(core if one is before else one for one in self._served)
            self._leaving += (before,)
        self._on_change()
        return before

    def remove(self, core: ModelCore) -> None:
        """Take the name from a core, which then leaves. Raises InvalidParameter where it must stay."""
        if len(self._served) == 1:
            raise InvalidParameter("name", "is the only model")
        for alias in self._aliases.values():
            if any(share.model == core.name for share in alias.shares):
                raise InvalidParameter("name", f"the alias {alias.name} stands for it: change that first")
        for rule in self._small.values():
            if core.name in (rule.name, rule.model):
                raise InvalidParameter("name", "--small-requests names it")
        self._served = _without(self._served, core)
        self._leaving += (core,)
        self._on_change()

    async def discard(self, core: ModelCore) -> None:
        """Wait for the calls of a core without a name, and close it."""
        await core.unused()
        await core.close()
        self._coming, self._leaving = _without(self._coming, core), _without(self._leaving, core)
        _log.info("model %s: %s is not served any more", core.name, core.digest[:12])

    def set_alias(self, alias: ModelAlias) -> None:
        """Let a name stand for models. Raises BadAlias."""
        check_targets([alias], [core.name for core in self._served])
        if self.get(alias.name) is not None or self._with_adapter(alias.name, None) is not None:
            raise BadAlias(f"{alias.name} is a name of a model or an adapter")
        self._aliases[alias.name] = alias

    def set_small_requests(self, rules: Iterable[SmallRequests]) -> None:
        """Let models answer small requests for others. Raises BadAlias for names that are not served."""
        for rule in rules:
            if rule.name not in self.names():
                raise BadAlias(f"{rule.name} is none of {', '.join(self.names())}")
            check_targets([ModelAlias("small", (Share(rule.model),))], [core.name for core in self._served])
            self._small[rule.name] = rule

    def drop_alias(self, name: str) -> None:
        """Let a name stand for nothing any more. Raises UnknownModel."""
        if self._aliases.pop(name, None) is None:
            raise UnknownModel(name, *self._aliases)

    async def close(self) -> None:
        """Close all models."""
        await asyncio.gather(*(core.close() for core in self.living))

    def is_free(self, name: str) -> bool:
        """Return whether nothing but a model of this very name has the name."""
        return not self._is_taken(name, besides=name)

    def _is_taken(self, name: str, *, besides: str) -> bool:
        others = (core for core in self._served if core.name != besides)
        return name in self._aliases or any(core.answers_to(name) for core in others)


def _without(cores: Sequence[ModelCore], core: ModelCore) -> tuple[ModelCore, ...]:
    return tuple(one for one in cores if one is not core)
