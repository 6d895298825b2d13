"""Index of errors: finds the entry of the site's error index that explains an error.

Errors are raised in hundreds of places, and their messages say what happened, so one table maps messages to entries.
An error of `errors` gets a note when it is made: the last line of its traceback is ``See: ID``. The tests hold the
table to the calls of the error index: the error of a call leads to its entry, and all ids are on the site. Do not add
messages here.
"""

from __future__ import annotations

import re
from functools import cache

PREFIX = "See: "

_STORE = (
    r"(\w*Store|(multi_|compare_|wait_)?[gs]et|set_timeout|set_on_disconnect|add|append|check|wait|delete_key|"
    r"list_keys|queue_\w+|release)"
)

ENTRIES = (
    # Classes whose errors have one cause.
    ("not-initialized", r"^NotInitializedError: "),
    ("rank-died", r"^(RankDiedError|RankError: rank \d+ of \d+ (?!failed with)\w+|CellError: rank \d+ (was|exited) )"),
    ("rank-did-not-arrive", r"^RankStalledError: "),
    ("group-in-a-forked-child", r"^GroupAbortedError: .* before this process was forked"),
    ("rank-left", r"^GroupAbortedError: "),
    ("not-of-this-job", r"^AuthenticationError: "),
    ("group-cannot-be-pickled", r"^PicklingError: cannot pickle '\w+' object: group "),
    ("object-cannot-be-pickled", r"^(PicklingError: |RemoteError: the (function returned|result of the rank) )"),
    ("key-did-not-appear", r"^StoreTimeoutError: "),
    ("queue-is-empty", r"^QueueEmptyError: "),
    ("rank-is-no-integer", r"^RankTypeError: "),
    ("ranks-wait-for-each-other", r"^DeadlockError: "),
    ("not-a-dump", r"^DumpError: "),
    ("ranks-did-not-finish", r"^(RankTimeoutError: |BlockedOutsideError: |CellError: ranks? [\d, ]+ did not answer)"),
    ("process-failed", r"^(Process\w*Exception|ChildFailedError|SignalException): "),
    # Agreement between ranks.
    ("ddp-models-differ", r"^MismatchError: DistributedDataParallel: "),
    ("groups-created-differently", r"^MismatchError: (new|split|shrink)_\w+: "),
    ("message-differs", r"^MismatchError: .* of a message of "),
    ("message-differs", r"^MismatchError: .* expects a message of "),
    ("bits-differ", r"^MismatchError: Fingerprints: "),
    ("calls-differ", r"^MismatchError: "),
    # Process groups.
    ("initialized-twice", r"default process group twice"),
    ("argument-types-of-init", r"^(ArgumentTypeError: init_process_group|UrlTypeError): "),
    ("arguments-of-init", r": init_process_group: "),
    ("environment-variable-missing", r" using env:// rendezvous: "),
    ("rendezvous-scheme", r": (No r|R)endezvous handler for "),
    (
        "rendezvous-url",
        r"(: Error initializing torch\.distributed using | has node-specific arguments| re-?rendezvous)",
    ),
    ("group-in-a-forked-child", r" this process was forked\b"),
    ("group-was-destroyed", r"^DestroyedGroupError: "),
    ("device-mesh", r": (DeviceMesh|init_device_mesh)\b"),
    # Training.
    ("micro-batches", r": MicroBatches: "),
    ("fingerprint-argument", r": (fingerprint|first_difference): "),
    ("hook-result", r"DistributedDataParallel: communication hook .*(returned|raised| its Future holds)"),
    (
        "hook-is-not-a-hook",
        r"((register_comm_hook|_comm_hook|hook_with_zero_step(_interleaved)?): | must be a communication hook)",
    ),
    ("hook-argument", r"(_\w*hook\w*: argument '(bucket|state|bucket_size)' must be a|: GradBucket\b)"),
    ("gradient-missing", r"Expected to have finished reduction"),
    ("ddp-argument", r": DistributedDataParallel: "),
    ("optimizer-argument", r": (\w+(Optimizer|Averager|State)\b|average_parameters: |get_params_to_average: )"),
    ("join-argument", r": Join\b"),
    ("pipe-argument", r": Pipe\b"),
    # Ranks and messages.
    ("message-to-itself", r"should not be the same as the rank of the current"),
    ("tag-is-negative", r" argument 'tag' must be an integer .* got -\d"),
    ("tag-is-no-integer", r" argument 'tag' must be an integer"),
    ("root-missing-or-twice", r"(Must specify|Can't specify both) "),
    ("rank-is-no-integer", r" must be an int, a (global|group) rank"),
    ("rank-not-in-group", r" must be a (global|group) rank"),
    ("wrong-p2pop", r": (P2POp: argument 'op'|batch_isend_irecv: )"),
    # Groups as arguments.
    ("not-a-member", r"( not in the given group| must be a group that this rank is in)"),
    ("not-a-group", r" argument '(group|parent_pg)' must be a group "),
    ("option-of-a-backend", r" argument '(pg_options|device_ids?)' must be "),
    ("work-without-a-call", r": Work\.wait: "),
    ("destroyed-twice", r": destroy_process_group: "),
    ("timeout-is-not-positive", r" argument 'timeout' must be more than zero"),
    ("timeout-is-no-timedelta", r"Expected timeout argument to be of type datetime\.timedelta"),
    ("unknown-backend", r"( argument 'backend' must be|Backend: argument 'name'|a device with a default backend)"),
    (
        "argument-of-a-local-call",
        r": (get_node_local_rank|get_default_backend_for_device|register_backend|empty_registered|set_debug_level|"
        r"Future\.\w+): ",
    ),
    (
        "ranks-are-no-integers",
        r"(Ranks are int| must be lists of ranks \(int\)| argument '(group|global)_rank' must be an int)",
    ),
    ("ranks-are-no-integers", r"group\w*: argument '\w*(ranks|size)\w*' must be .*, got [\[(]*'"),
    ("ranks-are-no-integers", r" at least one (global rank, got|list of ranks, got [^\[])"),
    (
        "size-of-subgroups",
        r"( must be a list of at least one list of| argument '(ranks_to_exclude|group_size)' must be )",
    ),
    ("ranks-of-a-new-group", r"(: (new|split|shrink)_\w*group\w*: | rank -?\d+ is not part of group )"),
    # Objects.
    ("list-on-the-wrong-rank", r"( must (NOT )?be specified on | on the source, got None)"),
    ("object-list-length", r"(the sender's list|one for each rank, on the source|of at least \d+ entries)"),
    ("object-list-type", r": \w*object\w*: "),
    # Lists and tensors.
    ("not-a-list-of-tensors", r"( of type (List\[)+torch\.Tensor\]| must be a list of lists of tensors)"),
    ("not-a-tensor", r" of type torch\.Tensor\n"),
    ("split-sizes", r" argument '(in|out)put_split_sizes"),
    ("list-of-wrong-length", r" must be a list of (\d+ (tensors|lists)|at least one tensor|one, as a rank)"),
    ("tensor-of-wrong-size", r" must be ((a tensor of )?\d+ elements|a tensor (whose first dimension|that) divides)"),
    ("different-dtypes", r"( different dtypes|all tensors need one dtype)"),
    (
        "tensor-is-not-dense",
        r"( must be a dense tensor| quantized tensors| accelerators, not torch\.sparse)",
    ),
    ("sparse-reduction", r" for sparse tensors"),
    ("device-not-supported", r" works on (dense )?tensors of "),
    ("tensor-overlaps-itself", r" whose elements do not overlap"),
    ("outputs-overlap", r" share memory, so only the later block"),
    ("not-a-reduction", r" argument 'op' must be a ReduceOp"),
    ("dtype-has-no-such-reduction", r"( argument 'op' must be |: op=ReduceOp\.\w+ requires )"),
    ("argument-of-a-group-method", r": ProcessGroup(\.\w+)?: "),
    # Stores.
    ("address-in-use", r"cannot listen on .*in use"),
    ("connection-refused", r"no connection to "),
    ("store-was-closed", r"(this store .* has been closed|the server at \S+ is gone)"),
    ("store-address", r"( did not resolve to an address|^(?!ArgumentType).*: argument 'host_name')"),
    ("key-type", r" must be .*(str or bytes|that UTF-8 can encode)"),
    ("counter-value", r"(one that holds a number|small enough for '.*' to fit)"),
    ("counter-amount", r"(: add: argument 'value'|: barrier: argument 'world_size' must be an int)"),
    ("operation-not-in-store", r" has no such operation"),
    ("store-argument-type", rf"^ArgumentTypeError: {_STORE}: "),
    ("store-file", r"^\w*(OS|Store)Error: FileStore: "),
    ("store-argument", rf": ({_STORE}|barrier): argument "),
    ("function-raised", r"^(RankError|RemoteError|CellError): "),
)
"""Entries, and expressions that ``CLASS: MESSAGE`` of their errors match; the first one counts."""

# An error of `testing.run` has the entry of the error that the rank's function raised, which may have been replaced by
# its text. Other ranks follow, indented.
_PREFIXES = (
    r"RemoteError: ",
    r"CellError: ranks? [\d, ]+ failed with ",
    r"RankError: rank \d+ of \d+ failed with (?:RemoteError: (?!the ))?",
)
_OF_A_RANK = re.compile(rf"^(?:{'|'.join(_PREFIXES)})(\w+: .*?)(?=\n(?:  )?ranks? |\Z)", re.DOTALL)


@cache
def compiled_patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Return the pattern of each entry, compiled on first use."""
    return tuple((entry, re.compile(pattern)) for entry, pattern in ENTRIES)


def general_entry(name: str) -> str:
    """Return the id of the general entry of an exception class.

    >>> general_entry("DistBackendError")
    'dist-backend-error'
    """
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def entry_of(error: BaseException) -> str:
    """Return the id of the entry that explains an error: by its message, else by its class.

    >>> from torchdist_ref.errors import ArgumentError
    >>> entry_of(ArgumentError("broadcast: Must specify src or group_src."))
    'root-missing-or-twice'
    """
    # The text of a KeyError is its message in quotes.
    message = error.args[0] if error.args else ""
    text = f"{type(error).__name__}: {message}"
    on_a_rank = _OF_A_RANK.search(text)
    for candidate in (on_a_rank[1], text) if on_a_rank else (text,):
        for entry, pattern in compiled_patterns():
            if pattern.search(candidate):
                return entry
    classes = (cls for cls in type(error).__mro__ if cls.__module__ == "torchdist_ref.errors")
    return general_entry(next((cls.__name__ for cls in classes), "DistError"))
