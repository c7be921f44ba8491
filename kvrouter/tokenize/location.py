"""Where a model's tokenizer is, and what its files say.

A tokenizer is named by a folder or by a hub id. A folder is read and nothing else; only for a hub
id is the local hub cache asked, and then the hub. The rules of which file wins are those of the
`transformers` library, which the engine uses to load the same files.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

DEFAULT = "default"
TOOL_USE = "tool_use"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+", re.ASCII)
_WANTED = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
]
_TOKEN_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class TokenizerError(Exception):
    """A model's tokenizer can't be loaded: a fault of the configuration, told at start."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What the files of one tokenizer say."""

    folder: Path
    config: dict[str, Any]
    special_tokens: dict[str, str]
    """Named special tokens (`bos_token`, ...): templates may use them."""
    templates: dict[str, Any]
    """Chat templates by name, usually `default` alone; empty when the model has none. Texts, where
    its files are in order."""
    model_type: str | None

    ranks: Path | None = None
    """A rank file that stands in for `tokenizer.json`."""

    @property
    def tokenizer_json(self) -> Path:
        """The file that holds vocabulary, merges and pre-tokenizer."""
        return self.folder / "tokenizer.json"


def find_tokenizer(folder_or_id: str, *, offline: bool = False) -> TokenizerFiles:
    """Find and read a tokenizer's files; raises `TokenizerError` saying what was tried.

    With `offline` a hub id is only looked up in the local hub cache.
    """
    folder = _folder(folder_or_id, offline=offline)
    ranks = _rank_file(folder_or_id)
    if ranks is None and not (folder / "tokenizer.json").is_file():
        present = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"
        raise TokenizerError(f"no tokenizer.json in {folder} (there is: {present})")
    config = _read_object(folder / "tokenizer_config.json")
    return TokenizerFiles(
        folder=folder,
        config=config,
        special_tokens=_special_tokens(config, _read_object(folder / "special_tokens_map.json")),
        templates=_templates(folder, config),
        model_type=_read_object(folder / "config.json").get("model_type"),
        ranks=ranks,
    )


def _rank_file(name: str) -> Path | None:
    path = Path(name).expanduser()
    return path if path.suffix == ".tiktoken" and path.is_file() else None


def _folder(folder_or_id: str, *, offline: bool) -> Path:
    path = Path(folder_or_id).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    if not _HUB_ID.fullmatch(folder_or_id) or folder_or_id in (".", ".."):
        raise TokenizerError(f"no folder {path} (and it is no hub id)")
    return _from_hub(folder_or_id, offline=offline)


def _from_hub(hub_id: str, *, offline: bool) -> Path:
    tried = [f"no folder {hub_id}"]
    for local in (True,) if offline else (True, False):
        where = "local hub cache" if local else "hub"
        try:
            folder = Path(
                huggingface_hub.snapshot_download(
                    hub_id, allow_patterns=_WANTED, local_files_only=local
                )
            )
        except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
            if isinstance(error, LocalEntryNotFoundError):  # its words are advice for programmers
                tried.append(f"{where}: {'not there' if local else 'cannot be reached'}")
            else:
                tried.append(f"{where}: {str(error).splitlines()[0] if str(error) else error!r}")
            continue
        if (folder / "tokenizer.json").is_file():
            return folder
        tried.append(f"{where}: no tokenizer.json")
    raise TokenizerError(
        f"no tokenizer for {hub_id!r}; tried: {'; '.join(tried)}. Give --tokenizer DIR_OR_HUB_ID, "
        'or backend = "remote" or "bytes" under [tokenizer]'
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return value


def _special_tokens(config: dict[str, Any], fallback: dict[str, Any]) -> dict[str, str]:
    """The named tokens; a null in the config means that there is none, whatever the other says."""
    tokens: dict[str, str] = {}
    for name in (f"{short}_token" for short in _TOKEN_NAMES):
        value = config.get(name, fallback.get(name))
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A `.jinja` file wins over `chat_template.json`, which wins over the tokenizer's config."""
    templates = _named(config.get("chat_template"))
    legacy = _read_object(folder / "chat_template.json").get("chat_template")
    templates |= _named(legacy)
    files = {DEFAULT: folder / "chat_template.jinja"}
    files |= {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    for name, path in files.items():
        if path.is_file():
            templates[name] = path.read_text(encoding="utf-8")
    return templates


def _named(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, dict):
        return {name: text for name, text in value.items() if isinstance(text, str)}
    entries = value if isinstance(value, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and "template" in entry
    }
