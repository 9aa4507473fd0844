#!/usr/bin/env python3
"""Writes the tests that cover every function and every struct of the header, however many there are.

    generate.py HEADER FOLDER

links.c   takes the address of every declared function
inits.c   uses the initialiser of every struct that begins with struct_size
misuse.c  calls every function with NULL, zeroed, misaligned and oversized arguments, with handles that are not live, and with
          every reserved field set
"""

import pathlib
import re
import sys

# Statuses of calls whose pointers are all NULL and whose numbers are all zero, where that is not UNSLOTH_STATUS_NULL_POINTER.
ALL_NULL = {
    "unsloth_comm_destroy": "SUCCESS",
    "unsloth_context_destroy": "SUCCESS",
    "unsloth_event_destroy": "SUCCESS",
    "unsloth_kv_cache_destroy": "SUCCESS",
    "unsloth_log_set": "SUCCESS",
    "unsloth_optimizer_destroy": "SUCCESS",
}

# The same with a live handle.
HANDLE_ALONE = {
    "unsloth_comm_abort": "SUCCESS",
    "unsloth_comm_error_get": "SUCCESS",
    "unsloth_comm_memory_free": "SUCCESS",
    "unsloth_comm_warm_up": "SUCCESS",
    "unsloth_context_warm_up": "SUCCESS",
    "unsloth_event_record": "SUCCESS",
    "unsloth_event_synchronize": "SUCCESS",
    "unsloth_gradients_scale": "SUCCESS",
    "unsloth_kv_cache_extend": "SUCCESS",
    "unsloth_kv_cache_sequence_evict": "INVALID_HANDLE",
    "unsloth_kv_cache_sequence_free": "INVALID_HANDLE",
    "unsloth_kv_cache_sequence_reserve": "INVALID_HANDLE",
    "unsloth_kv_cache_sequence_truncate": "INVALID_HANDLE",
    "unsloth_memory_copy": "INVALID_ARGUMENT",
    "unsloth_memory_copy_peer": "SUCCESS",
    "unsloth_memory_free": "SUCCESS",
    "unsloth_memory_free_async": "SUCCESS",
    "unsloth_memory_limit_set": "SUCCESS",
    "unsloth_memory_peak_reset": "SUCCESS",
    "unsloth_memory_pool_trim": "SUCCESS",
    "unsloth_memory_set": "SUCCESS",
    "unsloth_optimizer_step": "SUCCESS",
    "unsloth_stream_destroy": "SUCCESS",
    "unsloth_stream_synchronize": "SUCCESS",
    "unsloth_stream_wait_event": "SUCCESS",
}

# Statuses of calls whose params ask for nothing, where that is not UNSLOTH_STATUS_INVALID_ARGUMENT for a tensor that is absent.
DEFAULT_PARAMS = {
    "unsloth_comm_id_create": "SUCCESS",
    "unsloth_context_create": "SUCCESS",
    "unsloth_inference_memory_estimate": "NULL_POINTER",
    # Tensors may be absent, and the group may not.
    "unsloth_send_receive_forward": "NULL_POINTER",
    "unsloth_send_receive_supported": "NULL_POINTER",
    # Lengths may not be absent.
    "unsloth_context_parallel_packed_get": "NULL_POINTER",
    # Structs that they point to are not there.
    "unsloth_attention_block_backward": "NULL_POINTER",
    "unsloth_attention_block_backward_supported": "NULL_POINTER",
    "unsloth_attention_block_backward_workspace_size": "NULL_POINTER",
    "unsloth_decoder_layer_backward": "NULL_POINTER",
    "unsloth_decoder_layer_backward_supported": "NULL_POINTER",
    "unsloth_decoder_layer_backward_workspace_size": "NULL_POINTER",
    "unsloth_mlp_backward": "NULL_POINTER",
    "unsloth_mlp_backward_supported": "NULL_POINTER",
    "unsloth_mlp_backward_workspace_size": "NULL_POINTER",
}

# The same with a pointer misaligned that is meant to be written through, where that is not UNSLOTH_STATUS_INVALID_ARGUMENT.
MISALIGNED = {
    ("unsloth_comm_id_create", "id"): "NULL_POINTER",  # of bytes, which lie anywhere
    ("unsloth_kv_cache_sequence_pages_get", "pages"): "INVALID_HANDLE",  # no room is offered there
    ("unsloth_attention_block_backward_supported", "implementation"): "NULL_POINTER",
    ("unsloth_attention_block_backward_workspace_size", "workspace_size"): "NULL_POINTER",
    ("unsloth_decoder_layer_backward_supported", "implementation"): "NULL_POINTER",
    ("unsloth_decoder_layer_backward_workspace_size", "workspace_size"): "NULL_POINTER",
    ("unsloth_send_receive_supported", "implementation"): "NULL_POINTER",
    ("unsloth_mlp_backward_supported", "implementation"): "NULL_POINTER",
    ("unsloth_mlp_backward_workspace_size", "workspace_size"): "NULL_POINTER",
}

# What a tensor may not ask for: the field, its value, the status, and what the message mentions.
TENSOR_MISUSE = [
    ("flags", "16", "INVALID_ARGUMENT", "{path}.flags"),
    ("quantization", "64", "UNSUPPORTED", "{path}.quantization"),
    ("dtype", "UNSLOTH_DTYPE_F8E5M2", "UNSUPPORTED", "f8e5m2"),
    ("data", "64", "INVALID_ARGUMENT", "has data but rank 0"),
]

PROLOGUE = """\
#include "check.h"

"""

MISUSE = """\
static unsloth_comm *comm, *dead_comm;
static unsloth_context *context, *dead_context;
static unsloth_event *event, *dead_event;
static unsloth_kv_cache *cache, *dead_cache;
static unsloth_optimizer *optimizer, *dead_optimizer;
// Where functions may write, and do not when they fail.
static uint64_t out[32];

static unsloth_kv_cache *small_cache(void) {
  unsloth_kv_cache_params params = UNSLOTH_KV_CACHE_PARAMS_INIT;
  unsloth_kv_cache *made = NULL;
  params.dtype = UNSLOTH_DTYPE_F32;
  params.num_layers = 1;
  params.num_kv_heads = 1;
  params.head_dim = 4;
  params.num_pages = 1;
  CHECK_OK(unsloth_kv_cache_create(context, &params, &made));
  return made;
}

static unsloth_comm *group_of_one(void) {
  unsloth_comm_id_params of_id = UNSLOTH_COMM_ID_PARAMS_INIT;
  unsloth_comm_params params = UNSLOTH_COMM_PARAMS_INIT;
  unsloth_comm *made = NULL;
  params.size = 1;
  CHECK_OK(unsloth_comm_id_create(&of_id, &params.id));
  CHECK_OK(unsloth_comm_create(context, &params, &made));
  return made;
}

static unsloth_event *some_event(void) {
  unsloth_event *made = NULL;
  CHECK_OK(unsloth_event_create(context, 0, &made));
  return made;
}

static unsloth_optimizer *some_optimizer(void) {
  static float weights[2], gradients[2];
  static int at = 0;
  unsloth_optimizer_params params = UNSLOTH_OPTIMIZER_PARAMS_INIT;
  unsloth_parameter parameter;
  unsloth_parameter_group group = {0, 0};
  unsloth_optimizer *made = NULL;
  memset(&parameter, 0, sizeof parameter);
  parameter.weight = f32_tensor(&weights[at], 1, -1, -1, -1);
  parameter.gradient = f32_tensor(&gradients[at], 1, -1, -1, -1);
  params.parameters = &parameter;
  params.groups = &group;
  params.num_parameters = params.num_groups = 1;
  at++;
  CHECK_OK(unsloth_optimizer_state_size(context, &params, &params.state_size));
  CHECK_OK(unsloth_memory_alloc(context, params.state_size, &params.state));
  CHECK_OK(unsloth_optimizer_create(context, &params, NULL, &made));
  return made;
}

static void spoil_out(void) { memset(out, 0xa5, sizeof out); }

static void check_out_untouched(void) {
  for (size_t i = 0; i < COUNT(out); i++) CHECK(out[i] == 0xa5a5a5a5a5a5a5a5u);
}

// A field that is refused with this value.
typedef struct {
  size_t offset, size;
  uint64_t value;
  unsloth_status status;
  const char *mentions;
} refusal;

// Makes a struct with nothing set but its size and that field.
static inline void ask(unsigned char *bytes, uint32_t size, const refusal *what) {
  memset(bytes, 0, size);
  memcpy(bytes, &size, sizeof size);
  memcpy(bytes + what->offset, &what->value, what->size);
}

// The last message mentions this.
static inline void check_mentions(const char *call, const char *word) {
  char message[1024];
  unsloth_last_error_message(message, sizeof message);
  if (strstr(message, word) != NULL) return;
  fprintf(stderr, "%s: \\"%s\\" does not mention %s\\n", call, message, word);
  exit(1);
}

"""

MISUSE_MAIN = """\
int main(void) {
  context = cpu_context();
  dead_context = cpu_context();
  comm = group_of_one();
  dead_comm = group_of_one();
  cache = small_cache();
  dead_cache = small_cache();
  event = some_event();
  dead_event = some_event();
  optimizer = some_optimizer();
  dead_optimizer = some_optimizer();
  CHECK_OK(unsloth_optimizer_destroy(dead_optimizer));
  CHECK_OK(unsloth_comm_destroy(dead_comm));
  CHECK_OK(unsloth_event_destroy(dead_event));
  CHECK_OK(unsloth_kv_cache_destroy(dead_cache));
  CHECK_OK(unsloth_context_destroy(dead_context));
"""


class Header:
    def __init__(self, text):
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        prototypes = re.findall(r"^([a-z][\w ]*?[ *]+)(unsloth_\w+)\(([^)]*)\);", text, flags=re.M)
        self.functions = [
            (returns.strip(), name, [self.argument(a) for a in arguments.split(",") if a.strip() != "void"])
            for returns, name, arguments in prototypes
        ]
        structs = re.findall(r"^typedef struct (\w+) \{(.*?)^\} \1;", text, flags=re.M | re.S)
        self.structs = {
            name: re.findall(r"^\s*([^;]*?[ *])(\w+)(?:\[(\w+)\])?;", fields, flags=re.M) for name, fields in structs
        }
        self.sized = [name for name, fields in structs if fields.split(";")[0].split() == ["uint32_t", "struct_size"]]
        self.handles = re.findall(r"^typedef struct (\w+) \1;", text, flags=re.M)
        assert self.functions and self.sized and self.handles, "the header is not recognised"

    @staticmethod
    def argument(text):
        """Type and name of an argument: `const struct unsloth_tensor *`, `x`."""
        return re.fullmatch(r"\s*(.*?[ *]+)(\w+)\s*", text, flags=re.S).groups()

    def fields(self, struct, wanted, path=""):
        """Ways to the fields that are wanted, those of structs embedded by value too: the way, and entries of an array or None."""
        for type_, name, entries in self.structs[struct]:
            of = type_.replace("struct ", "").strip()
            if wanted(of, name):
                yield path + name, int(entries) if entries else None
            if of in self.structs:
                yield from self.fields(of, wanted, f"{path}{name}.")

    def kind(self, type_):
        words = type_.replace("struct ", "").replace("const ", "").split()
        name, stars = words[0], "".join(words[1:])
        if stars == "*" and name in self.handles:
            return "handle", name
        if stars == "*" and name in self.sized:
            return ("params" if "const" in type_ else "result"), name
        if stars:
            return "pointer", name
        return ("stream" if name == "unsloth_stream" else "number"), name


def initialiser(struct):
    return f"{struct.upper()}_INIT"


def links(header):
    yield PROLOGUE + "typedef void (*function)(void);\n\nint main(void) {\n  const function functions[] = {"
    for _, name, _ in header.functions:
        yield f"      (function){name},"
    yield "  };\n  for (size_t i = 0; i < COUNT(functions); i++) CHECK(functions[i] != NULL);\n  return 0;\n}"


def inits(header):
    yield PROLOGUE + "int main(void) {"
    for struct in header.sized:
        yield f"""\
  {{
    {struct} value = {initialiser(struct)};
    {struct} zero;
    memset(&zero, 0, sizeof zero);
    CHECK(value.struct_size == sizeof value);
    value.struct_size = 0;
    CHECK(memcmp(&value, &zero, sizeof zero) == 0);
  }}"""
    yield "  return 0;\n}"


def refusals(header, name, kind):
    """What a struct may not ask for: its reserved fields, and those of its tensors."""
    # Of what the caller gets, the structs inside are written over.
    inside = kind == "params"
    for path, entries in header.fields(name, lambda _, field: field.startswith("reserved")):
        for at in range(entries or 1) if inside or "." not in path else ():
            yield path + (f"[{at}]" if entries else ""), "7", "INVALID_ARGUMENT", path
    for path, _ in header.fields(name, lambda of, _: of == "unsloth_tensor") if inside else ():
        for field, value, status, mentions in TENSOR_MISUSE:
            yield f"{path}.{field}", value, status, mentions.format(path=path)


def refused(header, name, kind, struct, call):
    """Sets each of these, alone, in a struct that asks for nothing."""
    found = list(refusals(header, struct, kind))
    if not found:
        return
    yield "  {\n  static const refusal refusals[] = {"
    for field, value, status, mentions in found:
        where = f"offsetof({struct}, {field}), sizeof((({struct} *)0)->{field})"
        yield f'      {{{where}, {value}, UNSLOTH_STATUS_{status}, "{mentions}"}},'
    yield f"  }};\n  static union {{\n    {struct} first;\n    unsigned char bytes[sizeof({struct})];\n  }} room;"
    yield "  for (size_t i = 0; i < COUNT(refusals); i++) {"
    yield "  ask(room.bytes, sizeof room.first, &refusals[i]);"
    yield call("refusals[i].status")
    yield f'  check_mentions("{name}", refusals[i].mentions);'
    yield "  }\n  }"


def misuse(header):
    yield PROLOGUE + MISUSE
    variables = {"unsloth_comm": "comm", "unsloth_context": "context", "unsloth_event": "event", "unsloth_kv_cache": "cache", "unsloth_optimizer": "optimizer"}
    assert set(header.handles) == set(variables), "a handle type is new: say here how to make one"
    called = []
    for returns, name, arguments in header.functions:
        if returns != "unsloth_status":
            continue
        called.append(name)
        yield f"static void misuse_{name}(void) {{\n  spoil_out();"
        kinds = [header.kind(type_) for type_, _ in arguments]

        def call(expected, misaligned=None, **given):
            values = []
            for at, ((type_, _), (kind, of)) in enumerate(zip(arguments, kinds)):
                value = given.get(kind, "0" if kind == "number" else "NULL")
                if at == misaligned:
                    value = "(void *)((char *)out + 1)"
                if kind == "handle" and value == "live":
                    value = variables[of]
                elif kind == "handle" and value == "dead":
                    value = f"dead_{variables[of]}"
                elif kind == "handle" and value != "NULL":
                    value = f"({of} *){value}"
                elif value != "NULL" and kind != "number":
                    value = f"({type_.strip()}){value}"
                values.append(value)
            status = expected if "[" in expected else f"UNSLOTH_STATUS_{expected}"
            return f"  CHECK_STATUS({name}({', '.join(values)}), {status});"

        yield call(ALL_NULL.get(name, "NULL_POINTER"))
        ends = name.endswith("_destroy") and len(kinds) == 1
        has_handle = "handle" in [kind for kind, _ in kinds]
        # What a call with one wrong argument is otherwise given.
        sound = {"pointer": "(void *)out"}
        structs = [(kind, struct) for kind, struct in kinds if kind in ("params", "result")]
        written = [
            (at, argument)
            for at, (type_, argument) in enumerate(arguments)
            if kinds[at][0] == "pointer" and "const" not in type_ and kinds[at][1] not in ("void", "char")
        ]
        for kind, struct in structs:
            # Alone and without a handle, the struct is always the one that is wrong.
            if has_handle or len(structs) > 1:
                sound[kind] = f"&{kind}"
                yield f"  {struct} {kind} = {initialiser(struct)};"
        if has_handle:
            if not ends:
                yield call(HANDLE_ALONE.get(name, "NULL_POINTER"), handle="live")
            yield "  void *other = NULL;"
            yield call("INVALID_HANDLE", handle="&other", **sound)
            yield call("INVALID_HANDLE", handle="dead", **sound)
            wrong = "cache" if kinds[0][1] == "unsloth_context" else "context"
            yield call("INVALID_HANDLE", handle=f"(void *){wrong}", **sound)
        live = {"handle": "live"} if has_handle else {}
        for kind, struct in structs:
            size = f"(uint32_t)sizeof({struct})"
            # The struct, with room behind it.
            yield f"  {{\n  static union {{\n    {struct} first;\n    unsigned char bytes[sizeof({struct}) + 16];\n  }} room;"
            good = live | sound | {kind: "(void *)&room"}
            yield "  memset(&room, 0, sizeof room);"
            yield call("INVALID_ARGUMENT", **good)
            yield f'  check_mentions("{name}", "struct_size");'
            yield "  room.first.struct_size = 1u << 20;"
            yield call("INVALID_ARGUMENT", **good)
            yield f'  check_mentions("{name}", "struct_size");'
            misaligned = good | {kind: "(void *)&room.bytes[1]"}
            yield call("INVALID_ARGUMENT", **misaligned)
            yield f'  check_mentions("{name}", "aligned");'
            if kind == "params":
                yield f"  room.first.struct_size = {size} + 8;\n  room.bytes[{size} + 7] = 1;"
                yield call("UNSUPPORTED", **good)
                yield f'  check_mentions("{name}", "struct_size");'
                yield f"  memset(&room, 0, sizeof room);\n  room.first.struct_size = {size};"
                yield call(DEFAULT_PARAMS.get(name, "INVALID_ARGUMENT"), **good)
                if DEFAULT_PARAMS.get(name) == "SUCCESS":
                    yield "  spoil_out();"
            yield "  }"
            yield from refused(header, name, kind, struct, lambda status: call(status, **good))
        for at, argument in written:
            yield call(MISALIGNED.get((name, argument), "INVALID_ARGUMENT"), misaligned=at, **live, **sound)
        yield "  check_out_untouched();\n}\n"
    yield MISUSE_MAIN.rstrip()
    for name in called:
        yield f"  misuse_{name}();"
    yield "  CHECK_OK(unsloth_event_destroy(event));\n  CHECK_OK(unsloth_kv_cache_destroy(cache));\n  CHECK_OK(unsloth_comm_destroy(comm));\n  CHECK_OK(unsloth_optimizer_destroy(optimizer));\n  CHECK_OK(unsloth_context_destroy(context));\n  return 0;\n}"


def main():
    header = Header(pathlib.Path(sys.argv[1]).read_text())
    folder = pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("links", links), ("inits", inits), ("misuse", misuse)):
        text = "\n".join(lines(header)) + "\n"
        path = folder / f"{name}.c"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main()
