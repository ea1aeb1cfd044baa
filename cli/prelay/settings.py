"""All settings, read in one place. Command line over environment (PRELAY_*) over TOML file over default."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from .apikeys import SEPARATOR, check_key, split_keys
from .classes import QUEUED_JOBS, QUEUED_TOKENS, per_class, written
from .errors import BadUsage
from .options import OPTIONS
from .password import with_password
from .redact import redact

#: PRELAY_ variables that are no settings.
OTHER_VARIABLES = frozenset(
    {"PRELAY_CONFIG", "PRELAY_CACHE_DIR", "PRELAY_CUDART", "PRELAY_FAULTS", "PRELAY_TRACE", "PRELAY_METRICS_PLACE"}
)

Count = Annotated[int, Field(ge=0, le=256)]
Blocks = Annotated[int, Field(ge=1, le=1 << 31)]


def default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "prelay"


def _check_url(secret: SecretStr) -> SecretStr:
    url = secret.get_secret_value()
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("redis", "rediss") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known = False
    if not known and not (url.startswith("unix://") and urlsplit(url).path):
        limit = "must be redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH"
        raise PydanticCustomError("prelay", "{words}, not '{url}'", {"words": limit, "url": redact(url)})
    return secret


def _check_block_size(value: int) -> int:
    """The engine pads keys in blocks of 64 positions; a KV block has to fit into one."""
    if value < 1 or 64 % value:
        raise PydanticCustomError("prelay", "must be 1, 2, 4, 8, 16, 32 or 64, not {value}", {"value": value})
    return value


def _check_gpus(value: str) -> str:
    """Numbers of GPUs, as the driver counts those that are visible here."""
    parts = value.split(",")
    if not all(part.strip().isdecimal() and int(part) < 1024 for part in parts):
        words = "must be numbers of GPUs with commas between, such as 0,1, not '{value}'"
        raise PydanticCustomError("prelay", words, {"value": value})
    return ",".join(str(int(part)) for part in parts)


def _read_keys(value: object) -> tuple[SecretStr, ...]:
    """From one text with commas, or from a list. What is wrong is told without the key."""
    found = split_keys(value) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(key, str | SecretStr) for key in found):
        raise PydanticCustomError("prelay", "must be text, or a list of texts")
    keys = [key.get_secret_value() if isinstance(key, SecretStr) else key for key in found]
    for number, key in enumerate(keys, 1):
        if problem := check_key(key):
            raise PydanticCustomError("prelay", "key {number} {problem}", {"number": number, "problem": problem})
    return tuple(map(SecretStr, keys))


def _per_class(defaults: Mapping[str, int], value: object) -> str:
    """A number for each class, written out: the variable of a child reads the same."""
    try:
        return written(per_class(str(value), defaults))
    except ValueError as error:
        words = {"words": str(error), "value": str(value)}
        raise PydanticCustomError("prelay", "{words}, not '{value}'", words) from None


class Settings(BaseSettings):
    """Every setting of every command; OPTIONS says what each is for."""

    model_config = SettingsConfigDict(
        env_prefix="PRELAY_", env_ignore_empty=True, extra="forbid", frozen=True, protected_namespaces=()
    )

    redis_url: Annotated[SecretStr, AfterValidator(_check_url)] | None = None
    redis_password_file: Path | None = None
    state_dir: Path = Field(default_factory=default_state_dir)
    model: Annotated[str, Field(min_length=1)] | None = None
    served_model_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    gpu: Annotated[int, Field(ge=0, le=1023)] = 0
    prefill_gpus: Annotated[str, AfterValidator(_check_gpus)] = "0"
    decode_gpus: Annotated[str, AfterValidator(_check_gpus)] = "0"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    exact: Literal["on", "off"] = "off"
    cuda_graphs: Literal["on", "off"] = "on"
    kv_transport: Literal["auto", "cuda_ipc", "pinned"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kernels: Literal["auto", "native", "torch"] = "auto"
    quantization: Literal["none", "w8a8"] = "none"
    max_model_len: Annotated[int, Field(ge=2, le=1 << 24)] | None = None
    prefill: Count | None = None
    decode: Count | None = None
    unified: Count = 0
    kv_blocks: Blocks | None = None
    prefill_kv_blocks: Blocks | None = None
    block_size: Annotated[int, AfterValidator(_check_block_size)] = 16
    max_running: Annotated[int, Field(ge=1, le=4096)] | None = None
    prefill_chunk: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    batch_step_ms: Annotated[float, Field(gt=0, le=60_000)] = 400
    prefix_cache: Literal["on", "off"] = "on"
    local_prefill_tokens: Annotated[int, Field(ge=0, le=2**20)] = 0
    max_preemptions: Annotated[int, Field(ge=0, le=1000)] = 3
    patience_s: Annotated[float, Field(gt=0, le=86_400)] = 30
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    decode_nice: Annotated[int, Field(ge=0, le=19)] | None = None
    api: Annotated[int, Field(ge=1, le=64)] = 1
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    api_key: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_read_keys)] = ()
    api_key_file: Path | None = None
    body_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 60
    max_queued_jobs: Annotated[str, BeforeValidator(partial(_per_class, QUEUED_JOBS))] = written(QUEUED_JOBS)
    max_queued_tokens: Annotated[str, BeforeValidator(partial(_per_class, QUEUED_TOKENS))] = written(QUEUED_TOKENS)
    keep: Literal["delivered", "emitted"] = "delivered"
    shutdown_grace_s: Annotated[int, Field(ge=0, le=3600)] = 10
    share_port: bool = False
    drain_s: Annotated[float, Field(ge=0, le=86_400)] = 5
    files_dir: Path | None = None
    batch: Count = 2
    batch_redis_url: Annotated[SecretStr, AfterValidator(_check_url)] | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    metrics_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    null_model: bool = False
    null_divergent: bool = False
    null_step_ms: Annotated[float, Field(ge=0, le=60_000)] = 1.0
    null_prefill_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    null_vocab: Annotated[int, Field(ge=2, le=1 << 24)] = 1000

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: object, info: Any) -> object:
        """`port = true` in a file would otherwise pass for 1."""
        if isinstance(value, bool) and info.field_name not in _SWITCHES:
            raise PydanticCustomError("prelay", "must not be true or false")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del dotenv_settings, file_secret_settings  # neither is read
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @property
    def url(self) -> str | None:
        return self.redis_url.get_secret_value() if self.redis_url else None

    @property
    def jobs_url(self) -> str | None:
        """Where RQ's jobs are: a server of their own, or the queue's."""
        return self.batch_redis_url.get_secret_value() if self.batch_redis_url else self.url

    @property
    def on_gpus(self) -> bool:
        """Whether workers compute on GPUs: the null model computes nowhere."""
        return self.device == "cuda" and not self.null_model

    @property
    def running(self) -> int:
        """Sequences that one worker runs at a time."""
        return self.max_running or (256 if self.device == "cuda" else 64)

    @property
    def chunk(self) -> int:
        """Prompt tokens computed in one step."""
        return self.prefill_chunk or (2048 if self.device == "cuda" else 256)

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of prefill, decode and unified workers."""
        usual = 0 if self.unified else 1
        prefill = usual if self.prefill is None else self.prefill
        decode = usual if self.decode is None else self.decode
        return prefill, decode, self.unified

    def environment(self) -> dict[str, str]:
        """Return the settings as variables for a child. URL and keys travel this way, and never in arguments."""
        values = self.model_dump(exclude_none=True, exclude={"api_key", "redis_password_file"})
        values |= {"redis_url": self.url} if self.redis_url else {}
        values |= {"batch_redis_url": self.jobs_url} if self.batch_redis_url else {}
        if self.api_key:
            values["api_key"] = SEPARATOR.join(key.get_secret_value() for key in self.api_key)
        return {OPTIONS[name].variable: str(value) for name, value in values.items()}


_SWITCHES = frozenset(option.name for option in OPTIONS.values() if option.is_switch)


def load(given: Mapping[str, object], config: str | None) -> Settings:
    """Read the settings. `given` is the command line's share. Raise BadUsage with one line."""
    file = config or os.environ.get("PRELAY_CONFIG") or None
    if file:
        _check_file(Path(file))

    class Loaded(Settings):
        model_config = SettingsConfigDict(toml_file=file)

    try:
        settings: Settings = Loaded(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise BadUsage(_explain(error.errors()[0], given, file)) from None
    settings = _with_password(settings)
    prefill, decode, unified = settings.counts()
    if settings.redis_url is None and not unified and not (prefill and decode):
        raise BadUsage(
            f"--prefill {prefill} --decode {decode} --unified {unified} serves nothing: at least one prefill and one"
            " decode worker, or one unified worker, or a --redis-url where others work, is needed"
        )
    return settings


def _with_password(settings: Settings) -> Settings:
    """Put the password of --redis-password-file into the URL: nothing after this knows of the file."""
    if settings.redis_password_file is None:
        return settings
    if settings.url is None:
        raise BadUsage("redis_password_file needs a --redis-url: the password is that server's")
    url = with_password(settings.url, settings.redis_password_file)
    return settings.model_copy(update={"redis_url": SecretStr(url), "redis_password_file": None})


def unknown_variables() -> list[str]:
    """Return PRELAY_ variables that no setting reads: most often misspelt ones."""
    known = {option.variable for option in OPTIONS.values()} | OTHER_VARIABLES
    return sorted(v for v in os.environ if v.startswith("PRELAY_") and v not in known and "_TEST_" not in v)


def _check_file(path: Path) -> None:
    try:
        keys = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadUsage(f"--config: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadUsage(f"--config: {path} is not valid TOML: {error}") from None
    for key, value in keys.items():
        if isinstance(value, dict):
            raise BadUsage(f"{path}: [{key}] is a table, and settings stand in none{_hint_for_table(key, value)}")
        if key not in OPTIONS:
            raise BadUsage(f"{path}: unknown key {key!r}{_did_you_mean(key)}")


def _hint_for_table(table: str, values: Mapping[str, object]) -> str:
    """Say of a table which of its keys belong where, so that one look at the file is enough."""
    known = [key for key in values if key in OPTIONS]
    unknown = [key for key in values if key not in OPTIONS]
    words = f": write {', '.join(known)} above all tables, without [{table}]" if known else ""
    if unknown:
        words += f"; unknown in it: {', '.join(repr(key) + _did_you_mean(key) for key in unknown)}"
    return words


def _did_you_mean(key: str) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), OPTIONS, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _explain(detail: ErrorDetails, given: Mapping[str, object], file: str | None) -> str:
    """Return one line that names the option where it was set, the limit and the value."""
    name = str(detail["loc"][0])
    option = OPTIONS[name]
    if name in given:
        where = option.flag
    elif os.environ.get(option.variable):
        where = option.variable
    else:
        where = f"{name} in {file}"
    limit = _limit(detail)
    return f"{where} {limit}" if detail["type"] == "prelay" else f"{where} {limit}, not {_shown(detail['input'])}"


def _shown(value: object) -> str:
    """A number or a word as it was written; quotes only where they help."""
    return str(value) if re.fullmatch(r"[\w.+-]+", str(value)) else repr(value)


def _limit(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    match detail["type"]:
        case "greater_than_equal":
            return f"must be at least {context['ge']}"
        case "less_than_equal":
            return f"must be at most {context['le']}"
        case "int_parsing" | "int_type" | "int_from_float" | "int_parsing_size":
            return "must be a whole number"
        case "float_parsing" | "float_type" | "finite_number":
            return "must be a number"
        case "bool_parsing" | "bool_type":
            return "must be true or false"
        case "literal_error":
            return f"must be {context['expected'].replace(chr(39), '')}"
        case "string_too_short":
            return "must not be empty"
        case "string_too_long":
            return f"must have at most {context['max_length']} characters"
        case "string_type" | "path_type":
            return "must be text"
        case _:
            return detail["msg"]
