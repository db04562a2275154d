"""The job file's schema: every key as a frozen model, what it accepts, what is not built yet, and its documentation."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from batchgen import jobfile, kinds
from batchgen.errors import ConfigError
from batchgen.where import check as check_filter

if TYPE_CHECKING:
    from batchgen.types import SamplingParams

# The features that the schema has and this version has not: key -> what is refused, in words, and when. Nothing that
# is accepted is ignored, so a key leaves this table in the commit that builds it.
NOT_SUPPORTED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "task": ("score, embed", lambda value: value != "generate"),
    "model.quantization": ("fp8, int4", lambda value: value not in (None, "int8")),
    "sampling.max_tokens": ("0", lambda value: value == 0),
    "sampling.repetition_penalty": ("other than 1", lambda value: value != 1),
    "sampling.presence_penalty": ("other than 0", lambda value: value != 0),
    "sampling.frequency_penalty": ("other than 0", lambda value: value != 0),
    "sampling.min_tokens": ("other than 0", lambda value: value != 0),
    "sampling.logprobs": ("log probabilities", lambda value: value is not None),
    "sampling.prompt_logprobs": ("log probabilities", lambda value: value is not None),
    "sampling.logit_bias": ("any entry", bool),
    "sampling.bad_words": ("any entry", bool),
    "sampling.repetition_stop": ("any value", lambda value: value is not None),
    "structured": ("structured output of every kind", lambda value: value is not None),
    "engine.attention": ("flash", lambda value: value == "flash"),
    "engine.parallel": ("any entry", bool),
    "engine.deterministic": ("true", bool),
    "errors.row_timeout": ("any value", lambda value: value is not None),
}


# -- the sections ------------------------------------------------------------------------------------------------------


class Section(BaseModel):
    """One mapping of the job file. `key` is its place in it: "" for the whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    key: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, data: Any) -> Any:
        """A section whose keys are all commented out is null in YAML."""
        return {} if data is None else data

    @field_validator("*", mode="after")
    @classmethod
    def _supported(cls, value: Any, info: ValidationInfo) -> Any:
        path = f"{cls.key}.{info.field_name}".lstrip(".")
        if path in NOT_SUPPORTED and NOT_SUPPORTED[path][1](value):
            raise PydanticCustomError("not_supported", "not supported yet in this version")
        return value


class ModelSpec(Section):
    """Which model runs, and how its weights are held."""

    key = "model"
    path: kinds.Text = Field(
        description="A Hugging Face folder, a GGUF file; either of them at an fsspec URL such as s3://bucket/folder "
        "(downloaded into `$BATCHGEN_CACHE`, by default ~/.cache/batchgen); a name on the Hugging Face hub "
        "(`org/name`, `hf://org/name@revision`, `org/name/file.gguf`); or `package:some_package/file.gguf` for a file "
        "inside an installed Python package, found without importing it."
    )
    revision: kinds.Text | None = Field(
        default=None, description="Branch, tag or commit on the hub; null is the default."
    )
    ignore_index: bool = Field(
        default=False,
        description="true reads a folder's safetensors files as if it had no model.safetensors.index.json, for one out "
        "of date: model.safetensors, else all files model-00001-of-0000N. Every tensor must be in them.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Number format of weights and activations. auto is the stored one (bfloat16 for quantised files); "
        "on a CPU float32 for stored float16 and where bfloat16 instructions are missing.",
    )
    quantization: Literal["int8", "fp8", "int4"] | None = Field(
        default=None,
        description="Quantise while loading. int8: weights by output channel, activations by token, 64 inputs at a "
        "time, as they come; embedding and norms stay as they are. `batchgen bench quality` says what it changes in a "
        "job's answers. Quantised checkpoints are recognised by themselves.",
    )
    tokenizer: kinds.Text | None = Field(
        default=None, description="Folder or file of another tokenizer than the model's own."
    )
    chat_template: kinds.Text | None = Field(
        default=None, description="A file with a chat template, or the Jinja itself, instead of the model's own."
    )
    max_model_len: kinds.Count | None = Field(
        default=None, description="Longest prompt plus answer in tokens; null is what the model was made for."
    )
    storage_options: dict[str, Any] = Field(
        default={}, description="Options for the store of `path`, as fsspec takes them. Never written into the results."
    )


class InputSpec(Section):
    """Which rows are read."""

    key = "input"
    path: kinds.Paths = Field(
        description="Files, glob patterns, or folders (their data files; names that start with _ or . are left out); "
        "local or any fsspec URL. Every `name=value` folder in a file's path gives its rows a column of that name, as "
        "text (`__HIVE_DEFAULT_PARTITION__` is null), where they have none of their own."
    )
    format: Literal["auto", "parquet", "jsonl", "openai", "csv", "arrow", "text"] = Field(
        default="auto",
        description="auto tells each file's format by its content, then by its name: CSV (.csv, .tsv) and plain text "
        "(.txt) by nothing else. csv: the first line names the columns; values stay text as they are written, an empty "
        "one is null, a quoted empty one is empty text. arrow: IPC files and streams, a record batch at a time. text: "
        "every line is a row with the one column `text`. openai, the "
        "lines of an OpenAI batch file, is never guessed.",
    )
    id: kinds.Text | None = Field(
        default=None,
        description="Column with the row's id, after which its random draws are named; null makes it the text "
        '"file:row". OpenAI requests have their `custom_id`.',
    )
    where: kinds.Text | None = Field(
        default=None,
        description="A filter over the columns: only rows for which it is true are read. It knows `== != < <= > >=`, "
        '`in`, `not in`, `is None`, `and`, `or`, `not`, `len(x)`, `int(x)`, `float(x)`, `x.startswith("a")`, '
        '`x.endswith("a")`, and `"a" in x` for a part of a text or a member of a list; a column is its bare name or '
        '`col["its name"]`. A comparison with null (or NaN) is never true, nor is its `not`, as in SQL. Text is no '
        "number: a row whose values do not fit is not dropped but fails, like one that cannot be read. Text beside a "
        "date or time is read as one. Row groups of Parquet that cannot match are not read.",
    )
    unicode_errors: Literal["error", "replace"] = Field(
        default="error",
        description="Text that is not valid Unicode fails its row, or gets U+FFFD in place of what is wrong.",
    )
    nan: Literal["error"] | None = Field(
        default="error", description="NaN and Infinity in JSON Lines, which JSON has not: a row error, or read as null."
    )
    allow_empty: bool = Field(default=False, description="true makes a job without any input rows a success.")
    limit: kinds.Count | None = Field(
        default=None,
        description="Read only that many rows from the start, for trials; such a run never writes `_SUCCESS`.",
    )
    storage_options: dict[str, Any] = Field(
        default={}, description="Options for the store of `path`, as fsspec takes them. Never written into the results."
    )

    @field_validator("where")
    @classmethod
    def _readable(cls, text: str | None) -> str | None:
        if text is not None:
            check_filter(text)
        return text

    @property
    def id_column(self) -> str | None:
        """The column that rows are named by."""
        return "custom_id" if self.format == "openai" else self.id


class PromptSpec(Section):
    """How a row becomes a prompt. At most one of `column`, `template`, `messages` and `token_ids` is given; without
    any, the first of the columns `messages`, `prompt` and `text` that exists is the prompt. OpenAI requests bring
    their own, and take none of the four."""

    key = "prompt"
    DEFAULT_COLUMNS: ClassVar = ("messages", "prompt", "text")
    column: kinds.Text | None = Field(
        default=None, description="Column with the prompt: text, or a list of chat messages."
    )
    template: kinds.Text | None = Field(
        default=None, description="The prompt's text: sandboxed Jinja over the row's columns."
    )
    messages: kinds.Messages | None = Field(
        default=None, description="Chat messages whose contents are Jinja over the row's columns."
    )
    token_ids: kinds.Text | None = Field(default=None, description="Column with the prompt as a list of token ids.")
    chat: kinds.Chat = Field(
        default="auto",
        description="Wrap a plain prompt as a user turn; auto does so when the model has a chat template.",
    )
    tools: kinds.Tools | None = Field(
        default=None,
        description="Tools for the chat template in OpenAI's form: the list itself, or the column that holds it.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="More variables for the chat template, such as `enable_thinking: false`."
    )
    system: Literal["as_is", "merge_into_user"] = Field(
        default="as_is",
        description="merge_into_user puts the text of system messages at the beginning of the user message behind them "
        "(an empty line between), for chat templates that refuse system messages; as_is leaves them to the template.",
    )
    continue_final_message: bool = Field(
        default=False,
        description="true leaves the turn open where a conversation ends with the assistant's message: the model is to "
        "go on with its text. A chat template that trims messages trims that one, too; the log says so once.",
    )
    special_tokens_in_content: Literal["literal", "allow"] = Field(
        default="literal",
        description="literal encodes a control token's text inside data as ordinary text, so that no row can forge a "
        "turn; allow encodes it as the control token.",
    )
    allow_empty: bool = Field(
        default=False,
        description="true takes an empty text for a prompt where the tokenizer begins every prompt with a token (BOS); "
        "elsewhere it has no tokens and stays a row error.",
    )
    too_long: Literal["error", "truncate_left", "truncate_right", "truncate_middle"] = Field(
        default="error",
        description="What happens to a prompt that leaves no room for an answer: a row error, or tokens are dropped at "
        "that place and the row says `truncated`.",
    )

    @model_validator(mode="after")
    def _one_way(self) -> PromptSpec:
        given = [name for name in ("column", "template", "messages", "token_ids") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} given, expected one of them at most")
        if self.messages is not None and self.chat is False:
            raise ValueError("messages given with chat: false, expected one of them at most")
        of_chats = (self.tools is not None, self.system != "as_is", self.continue_final_message)
        if self.token_ids is not None and (self.chat is True or any(of_chats) or self.chat_template_kwargs):
            raise ValueError("token_ids are taken as they are, without chat, tools and other options of chats")
        for name in ("messages", "tools", "continue_final_message"):
            if name in self.chat_template_kwargs:
                raise ValueError(f"chat_template_kwargs holds {name}, which is a key of `prompt` itself")
        return self


class SamplingSpec(Section):
    """How answers are drawn and where they stop."""

    key = "sampling"
    FROM_MODEL: ClassVar = ("temperature", "top_p", "top_k", "min_p")  # what `defaults: model` may fill in
    max_tokens: kinds.Natural | None = Field(
        description="Most tokens in one answer; null is what the prompt leaves of the context. There is no hidden cap. "
        "OpenAI requests bring their own or none, and take null here."
    )
    defaults: Literal["none", "model"] = Field(
        default="none",
        description="model takes temperature, top_p, top_k and min_p from the model's generation_config.json where the "
        "job does not give them.",
    )
    column: kinds.Text | None = Field(
        default=None,
        description="Column (an object, struct or JSON text) whose non-null fields override these keys for its row; "
        "a row's `n` is at most 128.",
    )
    temperature: kinds.NaturalNumber = Field(
        default=0.0, description="0 takes the most likely token every time; 1 draws from the model's own distribution."
    )
    top_p: kinds.PositiveShare = Field(
        default=1.0, description="Draw from the most likely tokens that together hold this probability; 1 is off."
    )
    top_k: kinds.Count | None = Field(default=None, description="Draw from that many most likely tokens; null is off.")
    min_p: kinds.Share = Field(
        default=0.0, description="Drop tokens less likely than this share of the most likely one; 0 is off."
    )
    n: kinds.Samples = Field(default=1, description="Answers for every row; each is a result row of its own.")
    seed: kinds.Seed = Field(
        default=0, description="Seed of all draws; the same seed gives a row the same draws in any batch."
    )
    repetition_penalty: kinds.PositiveNumber = Field(
        default=1.0, description="Above 1 makes tokens of the prompt and the answer less likely to come again."
    )
    presence_penalty: kinds.Number = Field(
        default=0.0, description="Taken off the logit of every token that the answer holds."
    )
    frequency_penalty: kinds.Number = Field(
        default=0.0, description="Taken off a token's logit once for every time that the answer holds it."
    )
    stop: kinds.Stops = Field(default=(), description="An answer ends before the first of these texts.")
    stop_token_ids: kinds.TokenIds = Field(
        default=(), description="Token ids that end an answer, beside the model's own."
    )
    include_stop: bool = Field(default=False, description="true keeps the stop text in the answer.")
    ignore_eos: bool = Field(default=False, description="true goes on after the model's end token; for measurements.")
    min_tokens: kinds.Natural = Field(default=0, description="No answer ends before it has that many tokens.")
    logprobs: kinds.Natural | None = Field(
        default=None, description="Log probabilities of that many likeliest tokens at each place of the answer."
    )
    prompt_logprobs: kinds.Natural | None = Field(
        default=None, description="Log probabilities of that many likeliest tokens at each place of the prompt."
    )
    logit_bias: dict[int, float] = Field(default={}, description="Token id to a number that is added to its logit.")
    bad_words: kinds.Texts = Field(default=(), description="Texts that no answer may hold.")
    repetition_stop: dict[str, Any] | None = Field(default=None, description="Ends an answer that repeats itself.")

    def params(self) -> SamplingParams:
        """What the engine takes; a temperature and the like as they stand here, `with_defaults` comes before."""
        from batchgen.types import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            n=self.n,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop=self.include_stop,
            ignore_eos=self.ignore_eos,
        )

    def with_defaults(self, generation_config: Mapping[str, Any]) -> SamplingSpec:
        """With `defaults: model`: what the job does not give is taken from the model's generation config."""
        if self.defaults == "none":
            return self
        given = self.model_fields_set
        if "repetition_penalty" not in given and generation_config.get("repetition_penalty") not in (None, 1):
            raise ConfigError(
                f"sampling.defaults: model: the model asks for a repetition_penalty of "
                f"{generation_config['repetition_penalty']}: not supported yet in this version; "
                f"set sampling.repetition_penalty: 1.0 to run without it"
            )
        named = {key: generation_config.get(key) for key in self.FROM_MODEL}
        if generation_config.get("do_sample") is False:
            named["temperature"] = 0.0
        elif generation_config.get("do_sample") is True and named["temperature"] is None:
            named["temperature"] = 1.0  # transformers' own default
        if named["top_k"] == 0:
            named["top_k"] = None  # off, as transformers writes it
        taken = {key: value for key, value in named.items() if value is not None and key not in given}
        stated = {key: getattr(self, key) for key in given}
        return validated(SamplingSpec, {**stated, **taken}, lambda _: "sampling.defaults: model: generation config")


class StructuredSpec(Section):
    """Holds every answer to a form. Exactly one key is given."""

    key = "structured"
    json_schema: dict[str, Any] | None = Field(default=None, description="A JSON Schema that the answer follows.")
    regex: kinds.Text | None = Field(default=None, description="A regular expression that the whole answer matches.")
    choices: kinds.Choices | None = Field(default=None, description="The answer is one of these texts.")
    grammar: kinds.Text | None = Field(default=None, description="A grammar that the answer follows.")
    column: kinds.Text | None = Field(default=None, description="Column with a JSON Schema for each row.")

    @model_validator(mode="after")
    def _one_form(self) -> StructuredSpec:
        if sum(getattr(self, name) is not None for name in type(self).model_fields) != 1:
            raise ValueError(f"expected exactly one of {', '.join(type(self).model_fields)}")
        return self


class OutputSpec(Section):
    """Where results go and what they hold."""

    key = "output"
    path: kinds.Text = Field(description="A folder of its own for results and progress, local or any fsspec URL.")
    format: Literal["parquet", "jsonl", "openai"] = Field(
        default="parquet",
        description="Format of the result files. openai writes a line for each row as OpenAI's batch API does, and at "
        "the end `output.jsonl`, `errors.jsonl` and `batch.json`.",
    )
    columns: kinds.Columns = Field(
        default={},
        description="Input columns that are carried over. One named like a result column becomes `input_<name>`. A "
        "type is for JSONL input, where a column without one is carried as JSON text.",
    )
    token_ids: bool = Field(default=False, description="true adds the answer's token ids as a column.")
    skip_special_tokens: bool = Field(default=True, description="false leaves control tokens in the text.")
    shard_rows: kinds.AutoCount = Field(
        default="auto",
        description="Input rows in a result file; auto is up to 8192 rows or 64 MiB. Fixed at the first start.",
    )
    storage_options: dict[str, Any] = Field(
        default={}, description="Options for the store of `path`, as fsspec takes them. Never written into the results."
    )

    @field_serializer("columns", when_used="json")
    def _columns_in_order(self, columns: Any) -> Any:
        """As a list: their order is part of what a run is, and JSON mappings are written sorted."""
        return columns if columns == "all" else [{name: kind} if kind else name for name, kind in columns.items()]


class EngineSpec(Section):
    """How the machine is used."""

    key = "engine"
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs; auto is the GPU where there is one (cuda: AMD's too)."
    )
    max_num_seqs: kinds.AutoCount = Field(default="auto", description="Most answers that are generated side by side.")
    max_batch_tokens: kinds.AutoCount = Field(default="auto", description="Most tokens in one step of the model.")
    kv_memory: kinds.KvMemory = Field(
        default="auto",
        description="Memory for the KV cache; auto is what the first rows show to be of use, within what is free. A "
        "share (above 0, up to 1.0) is of what is free beside the weights, a step of the model and the rows on their "
        "way. Limits of containers count.",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = Field(
        default="auto",
        description="Number format of the KV cache; auto is the model's. bfloat16 beside a float32 model holds twice "
        "the tokens and reads them faster, for keys and values rounded to bfloat16. float16 and fp8 (E4M3) need a GPU.",
    )
    block_size: kinds.BlockSize = Field(default="auto", description="Tokens in one block of the KV cache.")
    prefix_cache: bool = Field(default=True, description="Rows with the same beginning compute it once.")
    attention: Literal["auto", "triton", "flash", "cpu", "reference"] = Field(
        default="auto", description="Attention backend; auto is the fastest for the device."
    )
    parallel: dict[str, Any] = Field(default={}, description="Devices in one model: tensor, pipeline, expert.")
    deterministic: bool = Field(default=False, description="true gives equal bytes whatever runs beside a row.")


class CheckpointSpec(Section):
    """How often progress is saved."""

    key = "checkpoint"
    interval: kinds.Duration = Field(
        default=60.0, description="Time between two saves: at most that much work is done again after a kill."
    )


class ErrorsSpec(Section):
    """When failures end the job."""

    key = "errors"
    max_failed: kinds.MaxFailed = Field(
        default=0.01,
        description="More failed rows than this, as a count (an integer) or a share of all rows, end the job.",
    )
    retries: kinds.Natural = Field(
        default=5,
        description="More tries for a read or write of the output store that fails in a way that may pass; with "
        "growing pauses, within a minute; reads of the input are always tried five times more.",
    )
    stall_timeout: kinds.Duration | None = Field(
        default=900.0,
        description="A run in which nothing moves for so long writes all stacks to standard error and ends with exit "
        "code 75, its progress saved as far as that is possible; null waits for ever.",
    )
    row_timeout: kinds.Duration | None = Field(default=None, description="Longest time for one row; null is none.")


class JobSpec(Section):
    """The keys that stand outside the sections."""

    name: kinds.Text = Field(
        default="job", description="The run's name in reports; by default the job file's, without its ending."
    )
    task: Literal["generate", "score", "embed"] = Field(
        default="generate", description="What the model does with each row."
    )
    model: ModelSpec
    input: InputSpec
    prompt: PromptSpec = PromptSpec()
    sampling: SamplingSpec
    structured: StructuredSpec | None = None
    output: OutputSpec
    engine: EngineSpec = EngineSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    errors: ErrorsSpec = ErrorsSpec()

    @model_validator(mode="after")
    def _openai(self) -> JobSpec:
        """OpenAI's lines have their places for prompt, parameters and results: keys that say it again are refused."""
        wrong = []
        if self.input.format == "openai":
            why = "input.format: openai takes it from the requests"
            given = {
                "input.id": self.input.id not in (None, "custom_id"),
                "prompt.chat": self.prompt.chat != "auto",
                "sampling.column": self.sampling.column is not None,
            }
            for key in ("column", "template", "messages", "token_ids"):
                given[f"prompt.{key}"] = getattr(self.prompt, key) is not None
            wrong += [f"{key} is given, but {why}; leave it out" for key, is_given in given.items() if is_given]
            if isinstance(self.prompt.tools, str):
                wrong.append(f"prompt.tools names a column, but {why}; give a list, or leave it out")
            if self.sampling.max_tokens is not None:
                wrong.append(
                    f"sampling.max_tokens is {self.sampling.max_tokens}, but {why}, and a request without one has what "
                    "is left of the context; set it to null"
                )
        if self.output.format == "openai":
            for key in ("columns", "token_ids"):
                if getattr(self.output, key):
                    wrong.append(f"output.{key} is given, but output.format: openai has no place for it; leave it out")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain data that `JobSpec.model_validate` reads back; storage options, which hold secrets, are left out."""
        data = self.model_dump(mode="json")
        for section in ("model", "input", "output"):
            data[section]["storage_options"] = {}
        return data


# -- reading -----------------------------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str],
    *,
    params: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> JobSpec:
    """The job file at `path`, with `--set` overrides ("a.b.c=VALUE") and then `${NAME}` references put in.

    `environ` is this process's environment by default.
    """
    where = os.fspath(path)
    data, place = _overridden(
        {"name": Path(path).stem, **jobfile.parse_mapping(jobfile.read(path), where)}, overrides, where
    )
    return validated(
        JobSpec, jobfile.substitute(data, params or {}, os.environ if environ is None else environ, where), place
    )


def parse(data: Mapping[str, Any], *, where: str = "job", overrides: Sequence[str] = ()) -> JobSpec:
    """A job given as plain data, in the shape of a job file. `where` names it in errors."""
    return validated(JobSpec, *_overridden(dict(data), overrides, where))


_Place = Callable[[tuple[str, ...]], str]


def _overridden(data: dict[str, Any], overrides: Sequence[str], where: str) -> tuple[dict[str, Any], _Place]:
    """`data` with the overrides in it, and a function that says where the value at a key comes from."""
    set_by: dict[tuple[str, ...], str] = {}
    for override in overrides:
        data, keys = jobfile.apply_override(data, override)
        secret = "storage_options" in keys
        set_by[keys] = f"--set {'.'.join(keys)}" if secret else f"--set {override}"

    def place(key: tuple[str, ...]) -> str:
        """The last override of the key, of what holds it or of what it holds; else the file."""
        if not key:  # the job as a whole
            return where
        blamed = [text for keys, text in set_by.items() if keys[: len(key)] == key[: len(keys)]]
        return blamed[-1] if blamed else where

    return data, place


_SectionT = TypeVar("_SectionT", bound=Section)


def validated(section: type[_SectionT], data: Mapping[str, Any], place: _Place) -> _SectionT:
    """`data` as a `section`, or a ConfigError with one line for everything that is wrong with it."""
    try:
        return section.model_validate(data)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            key = tuple(str(part) for part in problem["loc"] if part != "[key]")
            path = ".".join((section.key, *key)).strip(".")
            named = path
            if problem["type"] == "not_supported" and isinstance(problem["input"], str | int | float):
                named = f"{path}: {problem['input']}"  # it is this value that is refused, not the key
            lines.append(f"{place(key)}: " + (f"`{named}`: " if named else "") + explained(problem, path))
        raise ConfigError("\n".join(lines)) from None


def explained(problem: ErrorDetails, path: str) -> str:
    """What is wrong at `path`, and what would be right."""
    given = problem["input"]
    value = type(given).__name__ if "storage_options" in path else kinds.shown(given)
    if problem["type"] == "extra_forbidden":
        return _unknown_key(path)
    if problem["type"] == "not_supported":
        return str(problem["msg"])
    if problem["type"] == "missing":
        return f"missing, expected {_expected(path)}"
    if problem["type"] == "value_error" and (text := str(problem["ctx"]["error"])):
        return text
    return f"{value} given, expected {_expected(path)}"


def _unknown_key(path: str) -> str:
    parent, _, key = path.rpartition(".")
    keys = {name: field for name, _, field in _keys(JobSpec)}
    siblings = [name.rpartition(".")[2] for name in keys if name.rpartition(".")[0] == parent]
    near = get_close_matches(key.lower(), siblings, 1) or [name for name in keys if name.endswith(f".{key}")]
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; the keys here are {', '.join(siblings)}"


# -- the schema in words -----------------------------------------------------------------------------------------------


def _section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, if it holds one."""
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def _keys(section: type[Section]) -> list[tuple[str, type[Section], FieldInfo]]:
    """Every key at and below `section`, in order: its full path, the section it stands in, its field."""
    found = []
    for name, field in section.model_fields.items():
        found.append((f"{section.key}.{name}".strip("."), section, field))
        inner = _section_of(field.annotation)
        found += _keys(inner) if inner else []
    return found


def _expected(path: str) -> str:
    """What `path` takes, in words; for a path inside a value, what the nearest key above it takes."""
    fields = {name: field for name, _, field in _keys(JobSpec)}
    while path not in fields and "." in path:
        path = path.rpartition(".")[0]
    return _words(fields[path].annotation, fields[path].metadata) if path in fields else "a mapping"


def _words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    for item in metadata:
        if isinstance(item, kinds.Kind):
            return item.expected
    section = _section_of(annotation)
    if section:
        required = [name for name, field in section.model_fields.items() if field.is_required()]
        return f"a mapping with at least {', '.join(required)}" if required else "a mapping"
    options = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _words(options[0], options[1:])
    if get_origin(annotation) is Literal:
        return " or ".join(filter(None, (", ".join(options[:-1]), options[-1])))
    if NoneType in options:
        return f"{_words(next(option for option in options if option is not NoneType))}, or null"
    return {bool: "true or false"}.get(annotation, "a mapping")


EXAMPLE = """\
name: reviews
model:
  path: HuggingFaceTB/SmolLM2-135M-Instruct
input:
  path: data/${DATE}/*.parquet        # batchgen run reviews.yaml --param DATE=2025-01-31
  id: review_id
prompt:
  messages:
    - {role: system, content: Answer with one word, positive or negative.}
    - {role: user, content: "{{ text }}"}
sampling:
  max_tokens: 8
output:
  path: s3://bucket/reviews/${DATE}/
  columns: [product, stars]
  storage_options: {key: "${env:S3_KEY}", secret: "${env:S3_SECRET}"}
checkpoint: {interval: 60s}
errors: {max_failed: 0.01}
"""

_INTRODUCTION = f"""\
# The job file

A job is one YAML file, such as this one:

```yaml
{EXAMPLE}```

Only `model.path`, `input.path`, `sampling.max_tokens` and `output.path` have to be there. An unknown key is an error,
never ignored. So is a value that this version cannot honour: *not supported yet* below says which.

- `--set sampling.temperature=0.7` on the command line overrides any key; the value is YAML.
- `${{NAME}}` is replaced by `--param NAME=VALUE`, `${{env:NAME}}` by the environment, `$${{` is a plain `${{`. A text
  that is wholly one reference takes the YAML type of its value. Nothing is replaced in `prompt`, `sampling` and
  `structured`.
- YAML is read as version 1.2: `no` and `on` are text, `1e-4` is a number. A key given twice is an error.
- Relative paths start from the working directory.
"""


def markdown() -> str:
    """docs/job-file.md, made from the schema."""
    sections: list[type[Section] | None] = [
        JobSpec,
        *(_section_of(f.annotation) for f in JobSpec.model_fields.values()),
    ]
    return "\n".join([_INTRODUCTION, *(_section_markdown(section) for section in sections if section)])


def _section_markdown(section: type[Section]) -> str:
    purpose = " ".join(line.strip() for line in (section.__doc__ or "").splitlines())
    lines = [f"## `{section.key}`" if section.key else "## Top level", "", purpose + _refused(section.key), ""]
    lines += ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in section.model_fields.items():
        if not _section_of(field.annotation):
            default = "required" if field.is_required() else f"`{_yaml(field.default)}`"
            meaning = f"{field.description}{_refused(f'{section.key}.{name}'.strip('.'))}"
            cells = (f"`{name}`", _words(field.annotation, field.metadata), default, meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _refused(path: str) -> str:
    return f" *Not supported yet: {NOT_SUPPORTED[path][0]}.*" if path in NOT_SUPPORTED else ""


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    print(markdown(), end="")
