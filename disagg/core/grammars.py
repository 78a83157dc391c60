"""Grammars that constrain answers, compiled by llguidance. Only this module imports llguidance at run time.

A grammar is a text in llguidance's JSON form, which holds a JSON schema, a regular expression, or a grammar in
llguidance's Lark dialect. A grammar depends on no tokenizer. A *matcher* combines a grammar with a model's
vocabulary.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from disagg.core.errors import InvalidRequestError, UnsupportedModelError
from disagg.core.json_schema.document import changed, without_ignored
from disagg.core.json_schema.exclusive import without_negations
from disagg.core.json_schema.other_keywords import with_old_dependencies, with_supported_keywords

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
"""Values of `format` in JSON schemas that llguidance knows."""
MAX_SPACES = 40
"""Longest white space between the tokens of JSON. Without a limit, a model could generate white space forever."""
KEPT_SCHEMAS = 256
"""Number of rewritten schemas that a process keeps, the latest ones."""
MAX_PROVEN_CHARACTERS = 1 << 16
"""Longest schema, as JSON text, in which keywords that llguidance does not support are rewritten."""
_TOO_DEEP = "a JSON schema is nested too deeply: use fewer levels, or $ref"
_UNPROVEN = (
    "a value of oneOf must satisfy exactly one branch, and the server cannot express this for branches that may "
    "overlap: give each branch a required property with a const of its own, or use anyOf"
)
_JSON_OPTIONS = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_SPACES}}}"}


def schema_grammar(schema: dict[str, Any]) -> str:
    """Returns the grammar of JSON texts that are valid for a JSON schema.

    Of `format`, only `FORMATS` restrict a text; others are annotations, as JSON Schema allows. Raises
    `InvalidRequestError` for a schema that is nested more deeply than Python's recursion limit allows.
    """
    return _grammar_of_schema(_schema_text(schema))


def _grammar_of_schema(text: str) -> str:
    return f'{{"grammars": [{{"json_schema": {text}}}]}}'


def schema_rule(schema: dict[str, Any]) -> str:
    """Returns a JSON schema as a term of llguidance's Lark dialect. `$ref` stays local to the schema.

    `format` and errors: as of `schema_grammar`.
    """
    return f"%json {_schema_text(schema)}"


def _schema_text(schema: dict[str, Any]) -> str:
    """Returns the JSON text of a schema as llguidance reads it: with options, without unknown formats, and with
    other keywords in the place of those that llguidance does not support, where possible."""
    try:
        return _rewritten(json.dumps(schema))
    except RecursionError as exc:
        raise InvalidRequestError(_TOO_DEEP) from exc


@functools.lru_cache(KEPT_SCHEMAS)
def _rewritten(given: str) -> str:
    known = changed(without_ignored(json.loads(given)), _with_known_format)
    if len(given) <= MAX_PROVEN_CHARACTERS:
        known = with_old_dependencies(without_negations(with_supported_keywords(known), _no_text))
    return json.dumps({"x-guidance": _JSON_OPTIONS} | known)


def _with_known_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema without a format that llguidance does not know."""
    given = schema.get("format")
    known = not isinstance(given, str) or given in FORMATS
    return schema if known else {key: one for key, one in schema.items() if key != "format"}


def _no_text(strings: list[dict[str, Any]]) -> bool:
    """Whether llguidance proves that no text satisfies all of some schemas of strings."""
    from llguidance import LLMatcher

    schema = {"type": "string", "allOf": strings}
    return LLMatcher.validate_grammar(_grammar_of_schema(json.dumps(schema))).startswith(
        "Unsatisfiable schema"
    )


def regex_grammar(regex: str) -> str:
    """Returns the grammar of the texts that a regular expression (Rust's `regex` syntax) matches as a whole."""
    return lark_grammar(f"start: TEXT\nTEXT: {regex_literal(regex)}")


def choice_grammar(choices: Sequence[str]) -> str:
    """Returns the grammar that accepts exactly the texts `choices`."""
    return lark_grammar("start: " + " | ".join(map(text_literal, choices)))


def lark_grammar(text: str) -> str:
    """Returns the grammar that `text` defines in llguidance's Lark dialect."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def any_grammar(text: str) -> str:
    """Returns the grammar that `text` defines in llguidance's Lark dialect or in GBNF.

    Raises `ValueError` for invalid GBNF.
    """
    from llguidance import grammar_from

    return lark_grammar(str(grammar_from("grammar", text)))


def followed_by(first: str, grammar: str) -> str:
    """Returns the grammar of the Lark rules `first`, in which `@body` refers to `grammar`."""
    try:
        [body] = json.loads(grammar)["grammars"]
        return json.dumps({"grammars": [{"lark_grammar": first}, {"name": "body", **body}]})
    except RecursionError as exc:
        raise InvalidRequestError(_TOO_DEEP) from exc


def text_literal(text: str) -> str:
    """Returns a text as a string literal of the Lark dialect."""
    return json.dumps(text, ensure_ascii=False)


def regex_literal(regex: str) -> str:
    """Returns a regular expression (Rust's `regex` syntax) as a literal of the Lark dialect."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(regex)}/"


def grammar_tokenizer(tokenizer: Any, vocab_tokens: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """Converts a transformers tokenizer to llguidance's form. Takes about a second for a large vocabulary.

    `vocab_tokens`: size of the model's vocabulary, which may exceed the tokenizer's. `eos_ids`: tokens that end an
    answer. Raises `UnsupportedModelError` without end tokens, for a tokenizer that is not of the `tokenizers`
    library, and for a tokenizer that llguidance cannot read.
    """
    from llguidance import LLTokenizer

    if tokenizer is None or not tokenizer.is_fast:
        raise UnsupportedModelError(
            "constrained answers need a tokenizer of the tokenizers library (tokenizer.json)"
        )
    if not eos_ids:
        raise UnsupportedModelError("constrained answers need a model with an end token (eos_token_id)")
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    largest = max(vocab_tokens, backend.get_vocab_size(with_added_tokens=True))
    try:
        return LLTokenizer(backend.to_str(), n_vocab=largest, eos_token=list(eos_ids))
    except (ValueError, RuntimeError) as exc:
        raise UnsupportedModelError(f"llguidance cannot read the model's tokenizer: {exc}") from exc


def compile_grammar(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Compiles a grammar to a matcher positioned at the start of an answer. Releases the GIL meanwhile.

    Raises `InvalidRequestError` for an invalid grammar, and for a grammar that no text satisfies.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    first = matcher.deep_copy()
    if not first.is_error():
        first.compute_bitmask()  # fails for a grammar that no text satisfies
    if first.is_error():
        raise InvalidRequestError(f"the grammar is not valid: {matcher_error(first)}")
    return matcher


def mask_executor(threads: int) -> LLExecutor:
    """Creates `threads` threads of llguidance that compute the masks of several matchers at once."""
    from llguidance import LLExecutor

    return LLExecutor(num_threads=threads)


def matcher_error(matcher: LLMatcher) -> str:
    """Returns the error of a matcher in one line, without llguidance's dump of its state."""
    error = " ".join(matcher.get_error().split("<state>")[0].split())
    return _UNPROVEN if "oneOf constraints are not supported" in error else error[:500]
