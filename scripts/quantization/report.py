"""The gate's report: one HTML file that needs nothing else, for people who must decide. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from scripts.quantization import pictures
from scripts.quantization.figures import EDGES, rise
from scripts.quantization.manifest import Manifest

_MEANING = {
    "PASS": "It may be served: make promote.",
    "FAIL": "It is not fit to be served. What is served now stays.",
    "ABSTAIN": "It could not be measured well enough to say. Nothing is promoted on it.",
}
_CSS = """
:root { --ink: #1f2328; --soft: #57606a; --line: #d8dee4; --page: #ffffff; --card: #f6f8fa;
  --original: #6e7781; --artifact: #3b6ea8; --bad: #b3261e; --good: #1a7f37; --unsure: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --page: #0d1117;
  --card: #151b23; --original: #9198a1; --artifact: #6ca4e8; --bad: #ff7b72; --good: #56d364; --unsure: #e3b341; } }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.what { color: var(--soft); margin: 0 0 1rem; } .note, footer { color: var(--soft); font-size: .875rem; }
.verdict { border-left: .5rem solid; background: var(--card); padding: .75rem 1rem; border-radius: .25rem; }
.verdict b { font-size: 1.25rem; } .PASS { border-color: var(--good); } .FAIL { border-color: var(--bad); }
.ABSTAIN { border-color: var(--unsure); } .verdict ul { margin: .5rem 0 0; padding-left: 1.25rem; }
table { border-collapse: collapse; width: 100%; font-size: .9375rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.text { overflow-wrap: anywhere; } .bad { color: var(--bad); } .good { color: var(--good); }
.off { color: var(--soft); }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: .25rem; padding: .75rem; }
figcaption { font-size: .875rem; color: var(--soft); margin-top: .25rem; }
figure b { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
"""


def html(manifest: Manifest, gate: Mapping[str, Any]) -> str:
    """`gate`: what gate_run.summary made."""
    title = f"{manifest.name} {manifest.digest}"
    verdict = gate["verdict"]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="what">{escape(_what(manifest))}</p>',
        f'<div class="verdict {verdict}"><b>{verdict}</b> {_MEANING[verdict]}{_list(gate["reasons"])}</div>',
        *(f'<p class="note">{escape(_sentence(note))}</p>' for note in gate["notes"]),
    ]
    if gate["figures"] is not None:
        parts += ["<h2>Against the original</h2>", _table(gate)]
    parts += ['<h2>In pictures</h2><div class="pictures">', *_pictures(manifest, gate), "</div>"]
    if gate["chats"]:
        parts += ["<h2>Sanity chats, at temperature 0</h2>", _chats(gate["chats"])]
    parts.append(f"<footer><p>{escape(_made(manifest, gate))}</p></footer>")
    head = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(f'{verdict}: {title}')}</title><style>{_CSS}</style>"
    )
    return head + "\n".join(parts) + "</html>\n"


def _what(manifest: Manifest) -> str:
    weights = manifest.quantization
    bits = weights.get("bits") or weights.get("w_bit") or 4
    return f"{manifest.source.model} ({manifest.source.revision}), {bits} bit by {manifest.producer}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _list(reasons: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in reasons)}</ul>" if reasons else ""


def _table(gate: Mapping[str, Any]) -> str:
    found, limits = gate["figures"], gate["limits"]
    rows = (
        (
            "Perplexity",
            f"{found['ppl_original']:.4g} → {found['ppl_artifact']:.4g} ({rise(found['ppl_rise'])})",
            f"{limits['ppl_rise_max']:+.0%} at most",
            found["ppl_rise"] <= limits["ppl_rise_max"],
        ),
        (
            "KL divergence, nats a token",
            f"{found['kl_mean']:.4f} ± {found['kl_error']:.4f} (99 % below {found['kl_p99']:.2f})",
            f"{limits['kl_mean_max']:.2f} at most",
            found["kl_mean"] <= limits["kl_mean_max"],
        ),
        (
            "Top-1 agreement",
            f"{found['top1']:.1%}",
            f"{limits['top1_min']:.0%} at least",
            found["top1"] >= limits["top1_min"],
        ),
    )
    body = "".join(
        f'<tr><td>{name}</td><td class="n">{value}</td><td class="n">{limit}</td>'
        f'<td class="{"good" if well else "bad"}">{"within" if well else "beyond"}</td></tr>'
        for name, value, limit, well in rows
    )
    measured = limits["measured"] or "provisional: no model of that size was measured"
    note = (
        f"Over {found['tokens']:,} tokens of text that calibration never saw, in {found['windows']} windows. "
        f"Limits of the size class {gate['size']} ({measured})."
    )
    head = '<tr><th>Figure</th><th class="n">Measured</th><th class="n">Limit</th><th></th></tr>'
    return f'<table>{head}{body}</table><p class="note">{escape(note)}</p>'


def _pictures(manifest: Manifest, gate: Mapping[str, Any]) -> list[str]:
    found, out = gate["figures"], []
    if found is not None:
        limit = found["ppl_original"] * (1 + gate["limits"]["ppl_rise_max"])
        bars = pictures.pair("", found["ppl_original"], found["ppl_artifact"], "{:.4g}", limit)
        out.append(_figure("Perplexity", "Lower is better; the line is the limit.", bars))
        names = [f"<{EDGES[0]:g}", *(f"{edge:g}" for edge in EDGES)]
        shares = [count / found["tokens"] for count in found["kl_histogram"]]
        caption = "Share of tokens by KL divergence in nats; each bar begins at its number."
        out.append(_figure("KL divergence", caption, pictures.columns(names, shares, "{:.0%}")))
    errors = [(layer.index, layer.error) for layer in manifest.run.layers if layer.error is not None]
    if errors:
        bars = pictures.columns([str(index) for index, _ in errors], [error for _, error in errors], "{:.2%}", few=8)
        caption = "Squared error of each layer's output over the output's own square, as the job measured it."
        out.append(_figure("Error by layer", caption, bars))
    else:
        out.append(_figure("Error by layer", "Not told by this producer.", ""))
    out.append(_figure("Size and speed", _speed_caption(gate), _speed(gate)))
    return out


def _speed(gate: Mapping[str, Any]) -> str:
    sizes, speed = gate["weight_bytes"], gate["speed"]
    rows = [pictures.pair("Weights, MiB", sizes["original"] / 2**20, sizes["artifact"] / 2**20, "{:,.0f}")]
    if speed["original"] and speed["artifact"]:
        for key, name in (
            ("tokens_per_s_alone", "Tokens/s, one alone"),
            ("tokens_per_s_together", "Tokens/s, together"),
            ("kv_tokens", "KV cache, tokens"),
        ):
            left, right = speed["original"][key], speed["artifact"][key]
            if left is not None and right is not None:
                rows.append(pictures.pair(name, left, right, "{:,.0f}"))
    return pictures.stack(rows)


def _speed_caption(gate: Mapping[str, Any]) -> str:
    original, artifact = gate["speed"]["original"], gate["speed"]["artifact"]
    if not original or not artifact:
        return "Grey: the original. Blue: the artifact."
    text = "Grey: the original. Blue: the artifact. On this machine, with the gate's engine settings."
    if original["kv_tokens"] and original["kv_tokens"] == artifact["kv_tokens"]:
        text += " The KV cache has a fixed size there, so none is gained."
    return text


def _figure(title: str, caption: str, svg: str) -> str:
    return f"<figure><b>{title}</b>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _chats(chats: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for chat in chats:
        original, artifact = chat["original"], chat["artifact"]
        if original["wrong"]:
            mark, kind = f"not counted: the original's {original['wrong']}", "off"
        elif artifact["wrong"]:
            mark, kind = artifact["wrong"], "bad"
        else:
            mark, kind = "well", "good"
        cells = "".join(f'<td class="text">{escape(_short(side["text"]))}</td>' for side in (original, artifact))
        rows.append(f'<tr><td>{escape(chat["ask"])}</td>{cells}<td class="{kind}">{escape(mark)}</td></tr>')
    head = "<tr><th>Asked</th><th>Original</th><th>Artifact</th><th></th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _short(text: str, most: int = 240) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[:most].rstrip() + " …"


def _made(manifest: Manifest, gate: Mapping[str, Any]) -> str:
    return (
        f"Judged {gate['at']} in {gate['seconds']:.0f} s, vLLM {gate['engine'] or 'did not start'}; "
        f"quantized {manifest.run.finished_at} on "
        f"{manifest.run.device_name} with {manifest.calibration.tokens:,} tokens of {manifest.calibration.source}. "
        f"Files {gate['files_sha256'][:12]}."
    )
