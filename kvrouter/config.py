"""The configuration: one strict, typed tree, read from a TOML file and the command line.

Every problem is reported with the path of the field that has it. All durations are in seconds
and all sizes in bytes or tokens, as the names say.
"""

import ipaddress
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvrouter.settings import hint
from kvrouter.worker_url import MAX_PATH_BYTES, short_name, socket_path

PositiveFloat = Annotated[float, Meta(gt=0, le=1e12)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=1e12)]
PositiveInt = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
WorkerUrl = Annotated[
    str,
    Meta(
        pattern=r"^(https?://[^/\s?#@]+/?|unix:(//)?/[^/\s?#][^\s?#]*)$",
        max_length=1024,
        description="http://host:port, without a user or a path such as /v1, or unix:/path",
        examples=["http://gpu1:8000"],
    ),
]
Endpoint = Annotated[
    str,
    Meta(
        pattern=r"^(tcp://\S+:\d{1,5}|ipc://\S+)$",
        description="tcp://host:port or ipc://path",
        examples=["tcp://gpu1:5557"],
    ),
]

NatsUrl = Annotated[
    str, Meta(pattern=r"^(nats|tls)://[^/\s?#]+/?$", description="nats://host:port")
]

TokenizerBackend = Literal["auto", "hf", "remote", "bytes"]
PolicyName = Literal["kv", "kv_blocks", "round_robin", "random", "least_requests", "least_tokens"]


_BEATS_A_LEASE = 3
"""One may be lost and the next late, and the replica is still not forgotten."""


class ConfigError(Exception):
    """The configuration cannot be used; the message says which field and why."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RankEvents(_Section, frozen=True, kw_only=True):
    """Where one data-parallel rank publishes its KV events, if the engine does not tell."""

    endpoint: Endpoint
    replay_endpoint: Endpoint | None = None
    topic: str = ""
    """As in the engine's --kv-events-config; empty takes all."""
    dp_rank: Annotated[int, Meta(ge=0)] = 0
    bind: bool = False
    """The engine connects and the router binds (an endpoint without `*` on the engine's side)."""


class WorkerConfig(_Section, frozen=True, kw_only=True):
    """One engine process."""

    url: WorkerUrl
    """`unix:/run/vllm.sock` is where `vllm serve --uds /run/vllm.sock` listens."""
    name: (
        Annotated[
            str,
            Meta(
                pattern=r"^[\w.:\-\[\]]+$",
                max_length=200,
                description="letters, digits and any of _.:-[]",
            ),
        ]
        | None
    ) = None
    """How it is called in logs and metrics, and by other routers. Its host and port where absent,
    or its socket's path with `:` for `/`, as `run:vllm.sock`."""
    api_key: str | None = None
    """Sent by the router's own probes; requests of clients keep their own."""
    kv_events: list[RankEvents] | None = None
    """Learned from the engine's /kv_event_sources where absent."""
    relayed: bool = False
    """Its events come over NATS, from a `kvrouter relay` beside it."""
    block_size: PositiveInt | None = None
    """In tokens. This and the next are learned from the engine's /metrics where absent."""
    capacity_blocks: PositiveInt | None = None
    """Of each rank."""


class EngineTlsConfig(_Section, frozen=True, kw_only=True):
    """TLS to workers with an `https` URL."""

    ca: str | None = None
    """A file with the authorities that may vouch for engines; those of the system where absent."""
    cert: str | None = None
    """A file with the router's own certificate, for engines that ask for one."""
    key: str | None = None


class PolicyConfig(_Section, frozen=True, kw_only=True):
    """How a worker is chosen."""

    name: PolicyName = "kv"
    w: NonNegativeFloat | None = None
    """What a block to prefill costs against an active block that is decoded. Given, `kv` is the
    plain `w * prefill_blocks + decode_blocks`, without the weights and the guard below."""
    copy_weight: NonNegativeFloat = 6.0
    """What a token costs, besides its prefill, that is computed and stored a second time although
    that evicts something, or although it is being computed elsewhere at this moment. Reuse and
    latency hardly change between 3 and 11."""
    request_tokens: NonNegativeFloat = 250.0
    """What an active request costs, in tokens to prefill: it slows every step of its engine."""
    fill_limit: Annotated[float, Meta(ge=0, le=1)] = 0.9
    """Active tokens above this share of a cache cost a token of prefill each, for soon requests
    would be preempted, and computed again."""
    slow_tokens: NonNegativeFloat = 5000.0
    """What a request's own output costs, in tokens to prefill, on a worker that takes twice as long
    for it as the others; three times: double that. Decoding takes longer than prefilling, so a slow
    worker is spared while others have room. 5,000 and 20,000 differ little."""
    miss_weight: NonNegativeFloat = 48.0
    """Of `kv_blocks`: what a block of the prompt that a worker lacks costs against an active one.
    Far above 1, because the copy evicts what another request would have found."""
    queue_weight: NonNegativeFloat = 8.0
    """Of `kv_blocks`: the same for a block that is queued there for prefill: it only takes time."""
    guard_ratio: Annotated[float, Meta(ge=1)] = 1.25
    """No worker gets a request that has more active ones than this times their mean, plus slack:
    a prefix that all want would else pile them up where it is cached."""
    guard_slack: NonNegativeFloat = 16.0
    """In requests. Small numbers differ by chance, and a burst of equal prompts belongs together:
    with less, 16 of them could not stay on one of 8 idle workers."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the least cost; above, near costs share the traffic: who is this much dearer gets e
    times less. In the unit of the cost: tokens for `kv`, blocks with `w` and for `kv_blocks`."""
    cpu_credit: Annotated[float, Meta(ge=0, le=1)] = 0.75
    """The share of a prefill that a block in an engine's CPU tier saves."""
    disk_credit: Annotated[float, Meta(ge=0, le=1)] = 0.25


class PredictionConfig(_Section, frozen=True, kw_only=True):
    """How long blocks are expected on a worker because a prompt was sent there."""

    ttl_s: PositiveFloat = 10.0
    """With KV events: until they confirm it. Should outlast the wait in an engine's queue."""
    blind_ttl_s: PositiveFloat = 120.0
    """Without events, predictions are all there is."""


class TokenizerConfig(_Section, frozen=True, kw_only=True):
    """How prompts become tokens."""

    path: str | None = None
    """A folder or hub id for every model; what the engine names as its root where absent."""
    models: dict[str, str] = {}
    """A folder or hub id by model name."""
    chat_template: str | None = None
    """A file to use in place of the tokenizer's own template (as `vllm serve --chat-template`)."""
    backend: TokenizerBackend = "auto"
    """`auto` takes `fastokens` where it is proven equal to `tokenizers`; `hf` is the latter.
    For models without files: `remote` asks the engine, `bytes` takes 4 bytes for a token."""
    backends: dict[str, TokenizerBackend] = {}
    """The same by model name."""
    send_ids: list[str] = []
    """Models whose engines get the ids of a prompt, so that they need not tokenize again."""
    check_every: Annotated[int, Meta(ge=0)] = 1000
    """One of so many prompts is encoded by `tokenizers` too and compared; 0 for none."""
    cache_bytes: Annotated[int, Meta(ge=0)] = 134_217_728
    """For each model: ids of text that was met before."""
    hash_cache_bytes: Annotated[int, Meta(ge=0)] = 16_777_216
    """For all models: block hashes of prompts that were met before, 0.6 KB for 1,024 tokens."""
    threads: PositiveInt = 2
    inline_bytes: Annotated[int, Meta(ge=0)] = 2048
    """Bodies up to this size are tokenized at once, longer ones in a thread. With `fastokens`,
    which takes a twentieth of the time, it is twenty times as much. With `hf`, bodies of up to
    40 KB are too, when no more characters than this are new."""
    max_queued: PositiveInt = 256
    """Prompts that may wait for a thread; those beyond are routed by their length."""
    max_queued_bytes: PositiveInt = 268_435_456
    deadline_s: PositiveFloat = 5.0
    """A prompt that is not tokenized by then is routed by its length."""


class TimeoutConfig(_Section, frozen=True, kw_only=True):
    """Deadlines of one request, in seconds."""

    connect_s: PositiveFloat = 5.0
    first_byte_s: PositiveFloat = 1800.0
    """From sending the request to the head of the response: a unary answer can take this long."""
    idle_s: PositiveFloat = 900.0
    """Between two pieces of a response."""
    head_s: PositiveFloat = 30.0
    """For a client to send the head of a request, once it has connected or begun."""
    body_s: PositiveFloat = 120.0
    """For the client to send its body."""
    keep_alive_s: PositiveFloat = 75.0
    """For a client's connection to stay open between requests."""
    stall_s: PositiveFloat = 300.0
    """For a client that reads nothing of its response."""
    shutdown_s: NonNegativeFloat = 30.0
    """For running requests to finish when the router stops."""


class RetryConfig(_Section, frozen=True, kw_only=True):
    """Another worker is tried before the first byte of a response."""

    max_attempts: PositiveInt = 3
    budget_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """Retries allowed per request in the long run, so that an outage is not multiplied."""
    budget_reserve: NonNegativeFloat = 20.0
    """Retries that may be spent at once."""


class BreakerConfig(_Section, frozen=True, kw_only=True):
    """A worker whose requests fail is left alone for a while."""

    failures: PositiveInt = 5
    """Failures in a row that open the breaker."""
    open_s: PositiveFloat = 2.0
    """How long it stays open at first; doubled each time its trial request fails."""
    max_open_s: PositiveFloat = 60.0
    backoff_s: PositiveFloat = 1.0
    """How long a worker that answered 429 or 503 is avoided, where it gives no Retry-After."""


class HealthConfig(_Section, frozen=True, kw_only=True):
    """Active probes of each worker's /health."""

    interval_s: PositiveFloat = 2.0
    timeout_s: PositiveFloat = 2.0
    failures: PositiveInt = 2
    """Probes in a row that must fail before a worker counts as unreachable."""


class EventConfig(_Section, frozen=True, kw_only=True):
    """The streams of KV events."""

    silent_s: PositiveFloat = 10.0
    """A rank that was sent cacheable prompts and said nothing for this long is event-silent."""
    replay_timeout_s: PositiveFloat = 5.0
    """For an engine to answer when it is asked for events that were lost."""
    replay_tries: PositiveInt = 3


class NatsConfig(_Section, frozen=True, kw_only=True):
    """NATS: what replicas tell one another, and the events of workers that have a relay."""

    servers: list[NatsUrl] = []
    """One or more of a cluster. Without any, NATS is not used. `nats://USER:PASSWORD@host:port`,
    with `%40` for an `@` and so on, is the same as `user` and `password`, for all servers."""
    learn_servers: bool = True
    """Use the others of the cluster too; False where their addresses don't work from here."""
    prefix: Annotated[str, Meta(pattern=r"^[\w-]+$", description="letters, digits, _ and -")] = (
        "kvrouter"
    )
    """The first token of all subjects: deployments that share a NATS need different ones."""
    relayed: bool = False
    """The events of all workers come from relays, not of those alone that say so."""
    discover: bool = False
    """Workers that relays announce are used, beside those that are configured. One stays while its
    engine answers, even if its relay or NATS does not; a relay that is stopped takes its workers
    out six seconds later, unless it is back by then."""
    user: str | None = None
    password: str | None = None
    token: str | None = None
    credentials: str | None = None
    """A .creds file."""
    nkey_seed: str | None = None
    """A file with an NKEY seed."""
    tls_ca: str | None = None
    """A file with the authorities that the servers' certificates are checked against."""
    tls_cert: str | None = None
    tls_key: str | None = None


class ReplicaConfig(_Section, frozen=True, kw_only=True):
    """Other routers before the same workers."""

    sync: bool = True
    """Share bookings with them, where there is NATS or a `local_bus`."""
    name: (
        Annotated[str, Meta(pattern=r"^[\w.:\-]+$", description="letters, digits and any of _.:-")]
        | None
    ) = None
    """No two running replicas may share one; host, process and chance where absent."""
    local_bus: str | None = None
    """A directory that the router's processes on this host share, for their sockets."""
    beat_s: PositiveFloat = 0.5
    """How often each says that it lives."""
    lease_s: PositiveFloat = 5.0
    """A replica that was not heard for so long is forgotten with its bookings: 3 beats or more."""
    warm_start: bool = True
    """Ask them first what an engine has cached, when its events are followed from now on."""


class LimitConfig(_Section, frozen=True, kw_only=True):
    """Bounds of what clients may ask for."""

    max_body_bytes: PositiveInt = 67_108_864 + 1_048_576
    """A little over 64 MiB."""
    max_head_bytes: Annotated[int, Meta(ge=1024)] = 65_536
    max_headers: PositiveInt = 128
    max_connections: PositiveInt = 16_384
    """Of clients, open at once; further ones get 503 and are closed."""
    max_active_requests: PositiveInt = 8192
    """Requests for engines at once; further ones get 503."""
    max_held_bytes: PositiveInt = 1_073_741_824
    """Of request bodies that are held at once, for retries; a body beyond that gets 503."""
    extra_paths: list[Annotated[str, Meta(pattern=r"^/", description="a path: /...")]] = []
    """More engine paths that clients may POST to."""


class ServerConfig(_Section, frozen=True, kw_only=True):
    """Where the router listens."""

    host: str = "127.0.0.1"
    """An address or a name; `*` for all addresses of both IP versions."""
    port: Port = 8000
    processes: Annotated[int, Meta(ge=1, le=256)] = 1
    """Routers on this host that serve the port together."""
    unix_socket: str | None = None
    """A path where local clients can connect too."""
    tls_cert: str | None = None
    """A file with the certificate for clients, and those up to its authority. TLS on `port` then;
    SIGHUP makes the router read it again."""
    tls_key: str | None = None
    """Its key, where that stands in a file of its own."""
    tls_client_ca: str | None = None
    """A file with the authorities of clients, which must have a certificate then."""
    proxy_protocol_from: list[str] = []
    """Addresses and networks of load balancers. A connection from one of them must begin with a
    PROXY protocol header (version 1 or 2, before TLS), which tells the client's address; one from
    elsewhere must not. `["0.0.0.0/0", "::/0"]` where all come through one."""
    admin_host: str = "127.0.0.1"
    admin_port: Port = 8001
    admin_tls_cert: str | None = None
    """The same as `tls_cert` for the second port, which has no TLS without it."""
    admin_tls_key: str | None = None
    admin_tls_client_ca: str | None = None
    """With it only those with a certificate of these authorities can read or drain anything."""
    cors_origins: list[
        Annotated[
            str,
            Meta(
                pattern=r"^(\*|[a-z][a-z0-9+.\-]*://[^/\s]+)$",
                description="an origin such as https://chat.example, or *",
            ),
        ]
    ] = []
    """Origins (`https://chat.example`) whose pages may call from a browser; `*` for all."""
    access_log: bool = False
    """One line per request on standard error."""


class Config(_Section, frozen=True, kw_only=True):
    """The whole configuration."""

    server: ServerConfig = ServerConfig()
    workers: list[WorkerConfig] = []
    engine_tls: EngineTlsConfig = EngineTlsConfig()
    policy: PolicyConfig = PolicyConfig()
    prediction: PredictionConfig = PredictionConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    retries: RetryConfig = RetryConfig()
    breaker: BreakerConfig = BreakerConfig()
    health: HealthConfig = HealthConfig()
    events: EventConfig = EventConfig()
    limits: LimitConfig = LimitConfig()
    nats: NatsConfig = NatsConfig()
    replicas: ReplicaConfig = ReplicaConfig()


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises ConfigError when it cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_config(tables: dict[str, Any]) -> Config:
    """The configuration that these tables make.

    Raises ConfigError that lists each section's first problem, by path.
    """
    problems: list[str] = []
    for field in msgspec.structs.fields(Config):
        if field.name in tables:
            try:
                msgspec.convert(tables[field.name], field.type)
            except msgspec.ValidationError as error:
                problems.append(_with_path(field, str(error)))
    problems += [f"{name}: there is no such section" for name in sorted(set(tables) - _SECTIONS)]
    if problems:
        raise ConfigError("\n".join(problems))
    config = msgspec.convert(tables, Config)
    _check_names(config)
    _check_tls(config)
    _check_nats(config.nats)
    _check_replicas(config.replicas)
    _check_balancers(config.server)
    _check_policy(tables.get("policy", {}))
    server = config.server
    if server.port and server.port == server.admin_port and server.host == server.admin_host:
        raise ConfigError(f"server.admin_port: {server.port} is the port for clients already")
    return config


_SECTIONS = {field.name for field in msgspec.structs.fields(Config)}


def _with_path(section: msgspec.structs.FieldInfo, message: str) -> str:
    what, _, path = message.partition(" - at `$")
    path = path.rstrip("`")
    return f"{section.name}{path}: {hint(section.type, path, what)}"


def worker_name(worker: WorkerConfig) -> str:
    """What the worker is called: its given name, else host and port of its URL."""
    return worker.name or short_name(worker.url)


def announced_worker(name: str, url: str) -> WorkerConfig:
    """A worker that its relay announces. Raises ConfigError if there can be none of this kind."""
    said = {"name": name, "url": url, "relayed": True}
    try:
        worker = msgspec.convert(said, WorkerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)[:200]) from error
    _check_address("url", url)
    if socket_path(url) is not None:
        raise ConfigError(f"url: {url[:200]} is a socket of its own host, not of ours")
    return worker


def _check_names(config: Config) -> None:
    seen: set[str] = set()
    names: dict[str, str] = {}
    """Of each URL."""
    for index, worker in enumerate(config.workers):
        name, url = worker_name(worker), worker.url.rstrip("/")
        _check_address(f"workers[{index}].url", worker.url)
        if name in seen:
            raise ConfigError(f"workers[{index}]: there is another worker named {name!r}")
        if url in names:
            raise ConfigError(f"workers[{index}].url: {url} is the worker {names[url]!r} already")
        seen.add(name)
        names[url] = name
        if worker.relayed and not config.nats.servers:
            raise ConfigError(f"workers[{index}].relayed: needs nats.servers")
        ranks: set[int] = set()
        for at, events in enumerate(worker.kv_events or ()):
            path = f"workers[{index}].kv_events[{at}]"
            _check_endpoint(path, events)
            if events.dp_rank in ranks:
                raise ConfigError(f"{path}.dp_rank: {events.dp_rank} is there already; number them")
            ranks.add(events.dp_rank)
    if config.nats.discover and not config.nats.servers:
        raise ConfigError("nats.discover: needs nats.servers (--nats URL)")


def _check_tls(config: Config) -> None:
    server, engines = config.server, config.engine_tls
    if server.tls_cert is None and (server.tls_key or server.tls_client_ca):
        raise ConfigError("server.tls_cert: is missing beside the other fields about TLS")
    if server.admin_tls_cert is None and (server.admin_tls_key or server.admin_tls_client_ca):
        raise ConfigError("server.admin_tls_cert: is missing beside the other fields about TLS")
    if engines.cert is None and engines.key is not None:
        raise ConfigError("engine_tls.cert: is missing beside its key")


def _check_nats(nats: NatsConfig) -> None:
    for at, server in enumerate(nats.servers):
        _check_port(f"nats.servers[{at}]", f"//{server.rpartition('//')[2].rpartition('@')[2]}")
    if nats.tls_cert is None and nats.tls_key is not None:
        raise ConfigError("nats.tls_cert: is missing beside its key")
    if (nats.user is None) != (nats.password is None):
        missing = "user" if nats.user is None else "password"
        raise ConfigError(f"nats.{missing}: is missing: user and password belong together")
    in_servers = ["servers"] if any("@" in server for server in nats.servers) else []
    ways = in_servers + [
        name
        for name in ("user", "token", "credentials", "nkey_seed")
        if getattr(nats, name) is not None
    ]
    if len(ways) > 1:
        first = "a user in servers" if in_servers else ways[0]
        raise ConfigError(f"nats.{ways[1]}: there is {first} already: give one of them")


def _check_replicas(replicas: ReplicaConfig) -> None:
    if replicas.lease_s < _BEATS_A_LEASE * replicas.beat_s:
        raise ConfigError(
            f"replicas.lease_s: {replicas.lease_s:g} is too short for beat_s = "
            f"{replicas.beat_s:g}: give {_BEATS_A_LEASE} beats or more"
        )


def _check_balancers(server: ServerConfig) -> None:
    for at, balancer in enumerate(server.proxy_protocol_from):
        try:
            ipaddress.ip_network(balancer)
        except ValueError as error:
            raise ConfigError(f"server.proxy_protocol_from[{at}]: {error}") from error


def _check_port(path: str, url: str) -> None:
    try:
        urlsplit(url).port  # noqa: B018  # reading it is the check
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_address(path: str, url: str) -> None:
    _check_port(path, url)
    if len((socket_path(url) or "").encode()) > MAX_PATH_BYTES:
        raise ConfigError(f"{path}: a unix socket's path has at most {MAX_PATH_BYTES} bytes")


def _check_endpoint(path: str, events: RankEvents) -> None:
    for name, endpoint in (
        ("endpoint", events.endpoint),
        ("replay_endpoint", events.replay_endpoint),
    ):
        if endpoint and endpoint.startswith("tcp:"):
            _check_port(f"{path}.{name}", endpoint)
        if endpoint and "*" in endpoint and not events.bind:
            raise ConfigError(
                f"{path}.{name}: {endpoint} is where the engine listens; give the host that the "
                f"router reaches it by"
            )


_PLAIN_LEAVES_OUT = (
    *("copy_weight", "request_tokens", "fill_limit", "slow_tokens", "guard_ratio", "guard_slack"),
)


def _check_policy(given: dict[str, Any]) -> None:
    if given.get("w") is not None and given.get("name") == "kv_blocks":
        raise ConfigError(
            "policy.w: kv_blocks does not go by it, but by miss_weight and queue_weight; with the "
            "name kv it is the plain formula"
        )
    unused = [name for name in _PLAIN_LEAVES_OUT if name in given]
    if given.get("w") is not None and unused:
        raise ConfigError(
            f"policy: w makes a formula without {', '.join(unused)}: give one of them"
        )
