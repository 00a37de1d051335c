"""Reading of the models that a gateway serves: their texts and digests, no weights."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import NamedTuple

from diptych.runtime.model_digest import model_digest
from diptych.runtime.model_files import fetched_model
from diptych.runtime.settings import StartupError
from gateway.config import GatewaySettings
from gateway.images.decoder import ImageDecoder
from gateway.images.fetcher import ImageFetcher
from gateway.images.intake import ImageIntake, ImageLimits
from gateway.images.memory import HeldMemory
from gateway.model.named_models import NamedModel
from gateway.model.served_model import ServedModel
from gateway.model.template_file import read_template
from gateway.setting_types import listed

_log = logging.getLogger(__name__)


class LoadedModel(NamedTuple):
    """Model without its weights, and the digest by which its workers are known."""

    model: ServedModel
    digest: str
    path: str = ""


def load_models(settings: GatewaySettings) -> list[LoadedModel]:
    """Load all models of the settings. Raises StartupError, also for two of the same content."""
    loaded: list[LoadedModel] = []
    for named in settings.models:
        one = load_model(settings, named)
        for other in loaded:
            if other.digest == one.digest:
                names = f"{other.model.card.name} and {one.model.card.name}"
                raise StartupError(f"--model: {names} are the same model: give it one name, and an alias")
        loaded.append(one)
    return loaded


def load_model(settings: GatewaySettings, named: NamedModel) -> LoadedModel:
    """Load a model's text side and compute its digest, in some tenths of a second. Raises StartupError."""
    try:
        path = fetched_model(named.path)
        template = None
        if settings.chat_template is not None and named in settings.models:
            template = read_template(settings.chat_template)
        model = ServedModel.load(
            path,
            named.name or settings.model_name,
            settings.max_model_len,
            listed(settings.served_model_name) if named.name is None else (),
            chat_template=template,
            reasoning=settings.reasoning_parser,
            mmproj=settings.mmproj if named in settings.models else None,
        )
        encoder = None if model.images is None else model.images.mmproj
        return LoadedModel(model, model_digest(path, encoder), str(path))
    except (FileNotFoundError, PermissionError) as error:
        raise StartupError(str(error)) from error


def image_intake(
    model: ServedModel, settings: GatewaySettings, memory: HeldMemory, fetcher: ImageFetcher | None = None
) -> ImageIntake:
    """Return what takes the images of requests for ``model``; of a model of text it refuses them."""
    limits = ImageLimits(settings.max_images, settings.max_image_mib << 20)
    if model.images is None:
        return ImageIntake(None, limits, memory)
    if find_spec("PIL") is None:
        why = "images need the extra `vision`: pip install 'diptych[vision]'"
        _log.warning("requests with images are refused: %s", why)
        return ImageIntake(None, limits, memory, why)
    decoder = ImageDecoder(model.images.spec, settings.max_image_pixels)
    return ImageIntake(decoder, limits, memory, fetcher=fetcher)
