"""`kvrouter explain`: where a request would go, and why."""

import argparse
import json
import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from kvrouter.startup import StartError

TIMEOUT_S = 30.0


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `explain` to the command line."""
    text = "ask a running router where a request would go, and why"
    parser = commands.add_parser("explain", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument(
        "file", metavar="FILE", help="a request body in JSON; - reads it from stdin"
    )
    parser.add_argument(
        "--admin",
        default="http://127.0.0.1:8001",
        metavar="URL",
        help="the router's second port (default: %(default)s)",
    )
    parser.add_argument("--ca", metavar="FILE", help="who vouches for it, where it has TLS")
    parser.add_argument("--cert", metavar="FILE", help="what it is shown, with its key")
    parser.add_argument("--path", help="the path it would be posted to (default: guessed)")
    parser.add_argument("--json", action="store_true", help="print the whole decision")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Ask and print; returns the exit status. Raises StartError when nobody answers."""
    body = sys.stdin.buffer.read() if options.file == "-" else _read(Path(options.file))
    decision = _ask(options.admin, options.path, body, _tls(options.ca, options.cert))
    sys.stdout.write(json.dumps(decision, indent=2) if options.json else table(decision))
    sys.stdout.write("\n")
    return 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}") from error


def _tls(ca: str | None, cert: str | None) -> ssl.SSLContext:
    """Raises StartError when the files are not what they should be."""
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert)
    except OSError as error:  # SSLError is one
        raise StartError(f"{ca if cert is None else cert}: {error}") from error
    return context


def _ask(admin: str, path: str | None, body: bytes, tls: ssl.SSLContext) -> dict[str, Any]:
    query = "?" + urllib.parse.urlencode({"path": path}) if path else ""
    url = admin.rstrip("/") + "/explain" + query
    if not url.startswith(("http://", "https://")):
        raise StartError(f"--admin wants an http URL, not {admin!r}")
    request = urllib.request.Request(url, data=body)  # noqa: S310  # its scheme was checked above
    try:
        with urllib.request.urlopen(  # noqa: S310  # likewise
            request, timeout=TIMEOUT_S, context=tls
        ) as response:
            decision: dict[str, Any] = json.load(response)
            return decision
    except urllib.error.HTTPError as error:
        raise StartError(_message(error.read())) from error
    except OSError as error:
        raise StartError(f"no router answers at {admin}: {error}") from error


def _message(reply: bytes) -> str:
    try:
        return str(json.loads(reply)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.decode("utf-8", "replace")


def table(decision: dict[str, Any]) -> str:
    """The decision as text: a line a candidate, cheapest first."""
    prompt = decision["prompt"]
    reason = f" ({prompt['reason']})" if prompt["reason"] else ""
    winner = decision["winner"]
    lines = [
        f"model {decision['model']}, policy {decision['policy']}",
        f"prompt: {prompt['tokens']} tokens, {prompt['fidelity']}{reason}",
        f"winner: {_rank(winner)}, by {decision['reason']}",
        *([f"degraded: {decision['degraded']}"] if decision.get("degraded") else []),
        "",
        f"{'worker':<28} {'overlap':>8} {'predicted':>9} {'active':>7} {'cost':>10}  terms",
    ]
    lines += [_line(candidate) for candidate in decision["candidates"]]
    if decision["filtered"]:
        lines += ["", "passed over, for they have too many active requests:"]
        lines += [_line(candidate) for candidate in decision["filtered"]]
    return "\n".join(lines)


def _line(candidate: dict[str, Any]) -> str:
    overlap = sum(candidate["overlap_blocks"].values())
    terms = ", ".join(f"{name} {value:g}" for name, value in candidate["terms"].items())
    return (
        f"{_rank(candidate):<28} {overlap:>8} {candidate['predicted_blocks']:>9} "
        f"{candidate['active_requests']:>7} {candidate['cost']:>10.2f}  {terms}"
    )


def _rank(rank: dict[str, Any]) -> str:
    return f"{rank['worker']}/{rank['dp_rank']}" if rank["dp_rank"] else str(rank["worker"])
