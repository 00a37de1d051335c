"""Models as the protocol describes them: metadata and, of Triton, configuration."""

from __future__ import annotations

from typing import Final

from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.runtime.errors import InvalidParameter
from gateway.access.access import Caller
from gateway.frontends.kserve.images import IMAGE
from gateway.frontends.kserve.request import OUTPUTS, VERSION, check_version
from gateway.served_models.core import ModelCore
from gateway.served_models.router import ModelRouter

PLATFORM: Final = "diptych"
_INPUTS: Final = (("text_input", "BYTES", 1), ("token_ids", "INT64", -1), ("sampling_parameters", "BYTES", 1))
_TYPES: Final = {"BYTES": oip.TYPE_STRING, "INT64": oip.TYPE_INT64}


def find_model(router: ModelRouter, name: str, version: str, caller: Caller) -> tuple[ModelCore, str]:
    """Return the model that a call names, and its name or that of its adapter.

    Raises InvalidParameter without a name, UnknownModel for another name or version.
    """
    if not name:
        raise InvalidParameter("name", "is required")
    core, own_name = router.models.describe(name, caller)
    adapter = core.require_name(own_name, caller)
    check_version(name, version)
    return core, core.name if adapter is None else adapter.name


def metadata_of(core: ModelCore, name: str) -> oip.ModelMetadataResponse:
    """Return the inputs and outputs of a model that is called ``name``."""
    metadata = oip.ModelMetadataResponse(name=name, versions=[VERSION], platform=PLATFORM)
    for tensor, datatype, size in _inputs(core):
        metadata.inputs.add(name=tensor, datatype=datatype, shape=[size])
    for tensor, datatype in OUTPUTS.items():
        metadata.outputs.add(name=tensor, datatype=datatype, shape=[-1])
    return metadata


def config_of(core: ModelCore, name: str) -> oip.ModelConfig:
    """Return the configuration of a model that is called ``name``: it batches by itself, and streams."""
    config = oip.ModelConfig(name=name, platform=PLATFORM, backend=PLATFORM, max_batch_size=0)
    for tensor, datatype, size in _inputs(core):
        config.input.add(name=tensor, data_type=_TYPES[datatype], dims=[size], optional=True)
    for tensor, datatype in OUTPUTS.items():
        config.output.add(name=tensor, data_type=_TYPES[datatype], dims=[-1])
    config.parameters["digest"].string_value = core.digest
    config.model_transaction_policy.decoupled = True
    return config


def _inputs(core: ModelCore) -> tuple[tuple[str, str, int], ...]:
    images = () if core.model.images is None else ((IMAGE, "BYTES", -1),)
    return (*_INPUTS, *images)
