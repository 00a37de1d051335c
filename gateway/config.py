"""Settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from diptych.runtime.settings import BUNDLED_MODEL, Port, ProgramSettings, internal, setting
from diptych.runtime.tls import TlsFiles
from gateway.access.jwt_rules import JwtRules
from gateway.adapters.adapter import parse_lora
from gateway.model.aliases import ModelAlias, parse_aliases
from gateway.model.named_models import NamedModel, parse_models
from gateway.ports import GRPC_PORT, HTTP_PORT, admin_port_beside, port_clash
from gateway.session.retry_policy import WORKER_WAIT_S
from gateway.setting_types import (
    Adapters,
    ImageHosts,
    KeyFile,
    LogPath,
    Models,
    ModelSplit,
    Origins,
    ReadableFile,
    ServerUrl,
    SmallRequests,
    TemplateFile,
)


class GatewaySettings(ProgramSettings):
    """Run a gateway: inference over gRPC and OpenAI's HTTP API, and an admin port for operators."""

    program: ClassVar[str] = "gateway"

    model: Models = setting(
        BUNDLED_MODEL,
        "GGUF file or Hugging Face folder, 'bundled' for the packaged model; or NAME=PATH, repeated for each "
        "of several.",
        section="Model",
    )
    grpc_port: Port = setting(
        GRPC_PORT, "Public gRPC port; 0 takes any free one.", section="Network", serving=False
    )
    http_port: Port = setting(
        HTTP_PORT,
        "Port of OpenAI's API, /metrics, /health and /ready; 0 takes any free one.",
        section="Network",
        serving=False,
    )
    admin_port: Port | None = setting(
        None,
        "gRPC port of the AdminService, for operators; default: the public one + 1; 0 takes any free one.",
        section="Network",
        serving=False,
    )
    reuse_port: bool = setting(
        False,
        "Let a successor listen on the same ports before this gateway has ended.",
        section="Network",
        serving=False,
    )
    api_keys_file: KeyFile | None = setting(
        None,
        "API keys, as `diptych key new` writes them; without the file no key is required.",
        section="Security",
        serving=False,
    )
    access_log: LogPath | None = setting(
        None,
        "File that gets a line of JSON for each call, of operators too; - is standard output.",
        section="Logging",
        serving=False,
    )
    jwt_issuer: str | None = setting(
        None,
        "Issuer (iss) of the JSON Web Tokens that are taken beside API keys; without it none is.",
        section="Security",
        serving=False,
    )
    jwt_audience: str | None = setting(
        None, "Audience (aud) that tokens must be for.", section="Security", serving=False
    )
    jwt_jwks: str | None = setting(
        None,
        "File or https URL of the issuer's public keys; default: as its OpenID configuration says.",
        section="Security",
        serving=False,
    )
    jwt_tenant_claim: str = setting(
        "tenant",
        "Claim of tokens with the tenant's name.",
        section="Security",
        serving=False,
        min_length=1,
        max_length=128,
    )
    tls_cert: ReadableFile | None = setting(
        None,
        "PEM certificate chain of the gRPC, HTTP and admin ports; it is read again when renewed.",
        section="Security",
        serving=False,
    )
    tls_key: Path | None = setting(
        None, "PEM key of --tls-cert.", section="Security", serving=False, validate_default=True
    )
    tls_client_ca: Path | None = setting(
        None,
        "PEM certificates that sign clients' certificates; with it, clients need one.",
        section="Security",
        serving=False,
    )
    cors_allow_origin: Origins = setting(
        "",
        "Origins whose pages may call the HTTP API from a browser, separated by commas; * is any.",
        section="Network",
        serving=False,
    )
    served_model_name: str = setting(
        "",
        "Names the model is served under, separated by commas or blanks; all are listed, and an answer has "
        "the one that was asked for. --model-name comes before them.",
        section="Model",
    )
    model_split: ModelSplit = setting(
        "",
        "Name that stands for models by weight, as NAME=MODEL:90,MODEL:10, or NAME=MODEL; may be repeated.",
        section="Model",
    )
    small_requests: SmallRequests = setting(
        "",
        "Requests for a name with few bytes of prompt that a smaller model answers, as NAME=MODEL:BYTES; may "
        "be repeated.",
        section="Model",
    )
    fallback_url: ServerUrl | None = setting(
        None,
        "OpenAI-compatible server, such as https://api.example.org/v1, that completions and chats go to over "
        "HTTP when no worker can take them; answers say so in a header.",
        section="Fallback",
        serving=False,
    )
    fallback_model: str = setting(
        "", "Model that is asked for there; default: the one that the client named.", section="Fallback"
    )
    fallback_key_file: Path | None = setting(
        None, "File with the API key of --fallback-url.", section="Fallback", serving=False
    )
    chat_template: TemplateFile | None = setting(
        None,
        "File with the chat template, in Jinja, in place of the model's own ones.",
        section="Model",
    )
    lora: Adapters = setting(
        "",
        "LoRA adapter to serve, as NAME=PATH; may be repeated. More can be loaded while the gateway serves.",
        section="LoRA",
    )
    max_lora_rank: Annotated[int, Field(ge=1, le=512)] = setting(
        64, "Largest rank of a LoRA adapter.", section="LoRA"
    )
    max_inflight: Annotated[int, Field(ge=1, le=65536)] = setting(
        256, "Requests that may be with the workers at once; more wait in the gateway.", section="Admission"
    )
    max_queued_tokens: Annotated[int, Field(ge=1)] = setting(
        400_000,
        "Prompt tokens that may wait for prefill; beyond, requests of tenants that have more than an equal "
        "share of them are refused.",
        section="Admission",
    )
    max_queue_delay_s: Literal["auto"] | Annotated[float, Field(gt=0, le=3600)] = setting(
        120.0,
        "Longest predicted wait for prefill, in seconds, that a request is accepted with; auto takes four "
        "times the prefill of an average request.",
        section="Admission",
    )
    fair_shares: Literal["shared", "alone"] = setting(
        "shared",
        "Tenants' shares while requests wait: shared, over all gateways of the directory; alone, at each.",
        section="Admission",
    )
    reasoning_parser: Literal["auto", "none", "harmony", "mistral", "seed_oss", "think"] = setting(
        "auto",
        "Form in which the model marks its reasoning, which answers have in a field of its own; auto: as "
        "chat template and tokenizer say; none: reasoning stays in the text.",
        section="Model",
    )
    lenient_json_schema: bool = setting(
        False,
        "Leave the keywords and patterns of JSON schemas out that outputs cannot be held to, instead of "
        "refusing the request.",
        section="Admission",
    )
    workers_fd: int | None = internal(None, "File with the workers that `diptych up` has started.")
    write_timeout: Annotated[float, Field(gt=0, le=3600)] = setting(
        60.0,
        "Seconds in which a client must take a message of its stream; then it ends with SLOW_READER.",
        section="Admission",
    )
    stream_buffer_mib: Annotated[int, Field(ge=1, le=65536)] = setting(
        64,
        "MiB of output that may wait for one stream's reader; beyond, it ends likewise.",
        section="Admission",
    )
    total_stream_buffer_mib: Annotated[int, Field(ge=1, le=1 << 20)] = setting(
        256,
        "MiB of output that may wait for all streams' readers; beyond, the stream with most of it ends.",
        section="Admission",
    )
    max_images: Annotated[int, Field(ge=0, le=256)] = setting(
        8, "Images that a request may have; 0 takes none.", section="Images"
    )
    max_image_mib: Annotated[int, Field(ge=1, le=1024)] = setting(
        20, "MiB that the files of a request's images may have together.", section="Images"
    )
    max_image_pixels: Annotated[int, Field(ge=1, le=1 << 28)] = setting(
        36_000_000, "Pixels of the largest image that is decoded.", section="Images"
    )
    image_memory_mib: Annotated[int, Field(ge=1, le=1 << 20)] = setting(
        512,
        "MiB of running requests' images that the gateway holds: their pixels, and files that it fetched.",
        section="Images",
    )
    allow_image_urls: ImageHosts = setting(
        "",
        "Hosts whose images are fetched for callers, separated by commas or blanks: NAME, *.NAME for all "
        "below it, each with :PORT, or *; private addresses never. Default: none.",
        section="Images",
    )
    image_url_timeout: Annotated[float, Field(gt=0, le=60)] = setting(
        5.0, "Seconds within which a remote image must have come.", section="Images"
    )
    local_prefill: Literal["auto", "always", "never"] = setting(
        "auto",
        "Prompts with few new tokens that their decode worker computes itself: auto, those that are done "
        "earlier so; always, all within its --max-local-prefill-tokens; never, none.",
        section="Workers",
    )
    worker_wait_timeout: Annotated[float, Field(ge=0, le=600)] = setting(
        WORKER_WAIT_S,
        "Seconds that a request which lost its worker waits for another one.",
        section="Workers",
    )
    auto_roles: bool = setting(
        False,
        "Let workers change between prefill and decode as the load asks for it; their supervisor must be "
        "able to start them so.",
        section="Workers",
    )
    min_prefill_workers: Annotated[int, Field(ge=1, le=4096)] = setting(
        1, "Ready prefill workers that --auto-roles leaves.", section="Workers"
    )
    min_decode_workers: Annotated[int, Field(ge=1, le=4096)] = setting(
        1, "Ready decode workers that --auto-roles leaves.", section="Workers"
    )
    auto_roles_pause_s: Annotated[float, Field(ge=0, le=3600)] = setting(
        30.0, "Seconds from the end of a change of roles to the next one by --auto-roles.", section="Workers"
    )
    slo_ttft_ms: Annotated[float, Field(ge=1, le=600_000)] = setting(
        2000.0,
        "Milliseconds to the first token that requests are to keep; the wanted workers of each role are "
        "computed from it.",
        section="Workers",
    )
    slo_itl_ms: Annotated[float, Field(ge=1, le=60_000)] = setting(
        200.0, "Milliseconds between tokens that they are to keep.", section="Workers"
    )
    await_workers_s: Annotated[float, Field(ge=0, le=3600)] = setting(
        0.0,
        "Seconds to wait for workers before the ports open; then they open anyway.",
        section="Workers",
        serving=False,
    )
    lame_duck: Annotated[float, Field(ge=0, le=60)] = setting(
        0.0,
        "Seconds from NOT_SERVING to the refusal of new requests at shutdown.",
        section="Shutdown",
        serving=False,
    )
    shutdown_timeout: Annotated[float, Field(ge=0, le=3600)] = setting(
        10.0, "Seconds that running requests get to finish at shutdown.", section="Shutdown"
    )
    batch_dir: Path | None = setting(
        None,
        "Folder of /v1/files and /v1/batches, which gateways of one machine may share; without it there are "
        "none. Prompts and outputs lie in it.",
        section="Batches",
        serving=False,
    )
    batch_concurrency: Annotated[int, Field(ge=1, le=4096)] = setting(
        16, "Requests of batches that this gateway runs at once.", section="Batches", serving=False
    )
    batch_max_file_mib: Annotated[int, Field(ge=1, le=1 << 20)] = setting(
        200, "MiB that an uploaded file may have.", section="Batches", serving=False
    )
    batch_max_total_mib: Annotated[int, Field(ge=1, le=1 << 30)] = setting(
        4096,
        "MiB in --batch-dir beyond which no file and no batch is taken.",
        section="Batches",
        serving=False,
    )
    batch_keep_days: Annotated[float, Field(gt=0, le=3650)] = setting(
        30.0, "Days after which ended batches and files are deleted.", section="Batches", serving=False
    )
    metrics_compat: Literal["none", "vllm"] = setting(
        "none",
        "Offer the metrics under another server's names as well, for its dashboards.",
        section="Logging",
        serving=False,
    )

    @field_validator("tls_key")
    @classmethod
    def _certificate_and_key(cls, key: Path | None, others: ValidationInfo) -> Path | None:
        if "tls_cert" not in others.data:
            return key  # reported already
        certificate = others.data.get("tls_cert")
        if (certificate is None) != (key is None):
            raise ValueError("goes with --tls-cert: give both or neither")
        if certificate is not None and key is not None:
            TlsFiles(certificate, key).check()
        return key

    @field_validator("tls_client_ca")
    @classmethod
    def _clients_need_tls(cls, client_ca: Path | None, others: ValidationInfo) -> Path | None:
        if not {"tls_cert", "tls_key"} <= others.data.keys():
            return client_ca  # reported already
        certificate, key = others.data.get("tls_cert"), others.data.get("tls_key")
        if client_ca is not None and (certificate is None or key is None):
            raise ValueError("goes with --tls-cert and --tls-key")
        if certificate is not None and key is not None:
            TlsFiles(certificate, key, client_ca).check()
        return client_ca

    @model_validator(mode="after")
    def _several_models_have_names(self) -> Self:
        if self.models[0].name is None:
            return self
        names = {"--model-name": self.model_name, "--served-model-name": self.served_model_name}
        for flag, given in names.items():
            if given:
                raise ValueError(f"{flag} is for a --model without a name, and NAME=PATH has one")
        if self.chat_template is not None and len(self.models) > 1:
            raise ValueError("--chat-template is for one model, and --model names several")
        return self

    @model_validator(mode="after")
    def _tokens_can_be_verified(self) -> Self:
        if (self.jwt_issuer is None) != (self.jwt_audience is None):
            raise ValueError("--jwt-issuer and --jwt-audience go together: give both or neither")
        if self.jwt_issuer is None:
            if self.jwt_jwks is not None:
                raise ValueError("--jwt-jwks goes with --jwt-issuer and --jwt-audience")
            return self
        from gateway.access.jwks import FileKeys, check_url  # PyJWT, which takes its time to be imported
        from gateway.access.tokens import is_url

        source = self.jwt_issuer if self.jwt_jwks is None else self.jwt_jwks
        if is_url(source) or self.jwt_jwks is None:
            check_url(source)
        else:
            FileKeys(Path(source))
        return self

    @property
    def models(self) -> tuple[NamedModel, ...]:
        """The models of --model."""
        return parse_models(self.model)

    @property
    def aliases(self) -> tuple[ModelAlias, ...]:
        """The names of --model-split."""
        return parse_aliases(self.model_split)

    @property
    def token_rules(self) -> JwtRules | None:
        """Return the rules for claims of tokens; None: none is taken."""
        if self.jwt_issuer is None or self.jwt_audience is None:
            return None
        return JwtRules(self.jwt_issuer, self.jwt_audience, self.jwt_tenant_claim)

    @model_validator(mode="after")
    def _mmproj_is_of_one_model(self) -> Self:
        if self.mmproj is not None and len(self.models) > 1:
            raise ValueError("--mmproj goes with one --model; of several, each is found beside its file")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if clash := port_clash(self.grpc_port, self.http_port, self.admin_port):
            raise ValueError(clash)
        return self

    @property
    def tls(self) -> TlsFiles | None:
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """The names and paths of --lora."""
        return [parse_lora(one) for one in filter(None, self.lora.split(","))]

    @property
    def resolved_admin_port(self) -> int:
        return admin_port_beside(self.grpc_port, self.admin_port)
