"""A training step of a Llama-shaped model beside PyTorch: loss curves of the same model on the same
data, then tokens per second and peak memory of a step.

The curves show that the gradients are right: 200 steps of AdamW with clipping, in f32 and in bf16,
from the same weights on the same batches of this folder's text. The steps are those of the shapes of
SmolLM2-135M, 8 sequences of 2048 tokens, and of Llama-3.2-1B, 4 of them, in bf16; the smaller one in
f32 too, which mixed precision is held against. Ours is one captured CUDA graph.
PyTorch runs eagerly, compiled and, where it is installed, with Liger's kernels. TRAIN names the
parts to measure: curves, 135M, 1B.
"""

import gc
import json
import math
import os
import pathlib
import statistics
import time

import torch
import torch.nn.functional as F
from common import OURS, Record, peer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

SMOL = dict(hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, layers=30, vocab=49152)
BILLION = dict(hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64, layers=16, vocab=128256)
EPSILON, THETA = 1e-5, 10000.0
ADAMW = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
MAX_NORM = 1.0
METHOD = (
    "Curves: loss of each step, the same initial weights and batches. Steps: median of the wall time of a step "
    "between synchronisations, contenders one after the other in one process; peak GiB is what PyTorch's allocator, from which "
    "ours takes its memory too, held at most. Of bf16 steps PyTorch's weights, gradients and moments are all bf16, 8 bytes a parameter; "
    "ours are bf16 weights with 16-bit remainders, and gradients and moments in f32, 16 bytes. With f32 masters PyTorch's are as many, all "
    "in f32 under automatic mixed precision."
)
POLICIES = ("NONE", "ELEMENTWISE", "MLP", "PROJECTIONS", "FULL")


# --- the model in PyTorch ---------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, size, liger):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.liger = liger

    def forward(self, x):
        if self.liger:
            return self.liger.LigerRMSNormFunction.apply(x, self.weight, EPSILON, 0.0, "llama", True)
        return F.rms_norm(x, x.shape[-1:], self.weight, EPSILON)


class Layer(nn.Module):
    def __init__(self, c, liger):
        super().__init__()
        self.c, self.liger = c, liger
        attended, kv = c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
        self.norm1, self.norm2 = Norm(c["hidden"], liger), Norm(c["hidden"], liger)
        self.qkv = nn.Linear(c["hidden"], attended + 2 * kv, bias=False)
        self.out = nn.Linear(attended, c["hidden"], bias=False)
        self.gate_up = nn.Linear(c["hidden"], 2 * c["intermediate"], bias=False)
        self.down = nn.Linear(c["intermediate"], c["hidden"], bias=False)

    def forward(self, x, cos, sin):
        c = self.c
        batch, seq, _ = x.shape
        sizes = [c["heads"] * c["head_dim"]] + [c["kv_heads"] * c["head_dim"]] * 2
        q, k, v = (
            t.view(batch, seq, -1, c["head_dim"]).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).split(sizes, -1)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, seq, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        act = self.liger.LigerSiLUMulFunction.apply(gate, up) if self.liger else F.silu(gate) * up
        return x + self.down(act)


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Liger:
    """What of Liger's the model uses."""

    def __init__(self):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        self.LigerRMSNormFunction = LigerRMSNormFunction
        self.LigerSiLUMulFunction = LigerSiLUMulFunction
        self.loss = LigerFusedLinearCrossEntropyFunction


class Model(nn.Module):
    """The embedding is the output projection."""

    def __init__(self, c, liger=None):
        super().__init__()
        self.c, self.liger = c, liger
        self.embedding = nn.Embedding(c["vocab"], c["hidden"])
        self.layers = nn.ModuleList(Layer(c, liger) for _ in range(c["layers"]))
        self.norm = Norm(c["hidden"], liger)
        for name, weight in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids, targets):
        d, weight = self.c["head_dim"], self.embedding.weight
        frequency = THETA ** (-torch.arange(0, d, 2, device=ids.device, dtype=torch.float32) / d)
        angle = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)[:, None] * frequency
        cos, sin = torch.cat([angle.cos()] * 2, -1).to(weight.dtype), torch.cat([angle.sin()] * 2, -1).to(weight.dtype)
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x).flatten(0, 1)
        if self.liger:
            return self.liger.loss.apply(x, weight, targets.flatten())[0]
        return F.cross_entropy(F.linear(x, weight).float(), targets.flatten())


class Peer:
    """PyTorch's step. Master weights, where there are any, are what it trains, as its automatic mixed precision does."""

    def __init__(self, c, state, dtype, compiled=False, liger=None, masters=False):
        self.dtype, self.masters = dtype, masters
        with torch.device("cuda"):
            self.model = Model(c, liger).to(torch.float32 if masters else dtype)
        self.model.load_state_dict(state)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **ADAMW)
        self.forward = torch.compile(self.model) if compiled else self.model

    def step(self, ids, targets):
        mixed = torch.autocast("cuda", self.dtype, enabled=self.masters)
        flash = sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True)
        with flash, mixed:
            loss = self.forward(ids, targets)
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


# --- the model in ours ------------------------------------------------------------------------------------


class Ours:
    """The same step by the library's operations, on tensors of PyTorch's, whose gradients are f32; those of layers may be `of_layers`.
    A step has one batch, so that its backward pass overwrites gradients: nothing zeroes them, and nothing reads what was there."""

    def __init__(self, ctx, c, state, dtype, batch, seq, policy="NONE", master=None, of_layers=torch.float32):
        self.ctx, self.c, self.dtype, self.device, self.of_layers = ctx, c, dtype, ctx.backend.lower(), of_layers
        k = ctx.library.constants
        new = lambda *shape, dtype=dtype: torch.zeros(*shape, dtype=dtype, device=self.device)  # noqa: E731
        self.weights = {name: w.to(self.device, dtype).contiguous().clone() for name, w in state.items()}
        self.gradients = self.make_gradients()
        self.ids, self.targets = (new(batch, seq, dtype=torch.int64) for _ in range(2))
        self.loss = new(1, dtype=torch.float32)
        hidden = [new(batch, seq, c["hidden"]) for _ in range(c["layers"] + 1)]
        normed, gradient = new(batch, seq, c["hidden"]), new(batch, seq, c["hidden"])
        self.optimizer = self.make_optimizer(master or ("NONE" if dtype == torch.float32 else "REMAINDER"))
        w, g = self.weights, self.gradients
        params = lambda op, **fields: ctx.params(op, **fields)  # noqa: E731
        forward, backward = [], []
        add = lambda calls, op, **fields: calls.append(ctx.op(op, **fields))  # noqa: E731

        add(forward, "embedding", ids=self.ids, table=w["embedding.weight"], out=hidden[0])
        rotation = dict(rotary_dim=c["head_dim"], theta=THETA, style=k["ROPE_STYLE_HALF_SPLIT"])
        for i in range(c["layers"]):
            of = lambda name, i=i: f"layers.{i}.{name}.weight"  # noqa: E731
            attention = params(
                "attention_block", num_heads=c["heads"], num_kv_heads=c["kv_heads"], head_dim=c["head_dim"], rotate=1,
                rotation=rotation, qkv_weight=w[of("qkv")], out_weight=w[of("out")],
            )
            mlp = params("mlp", activation=k["ACTIVATION_SILU"], gate_up_weight=w[of("gate_up")], down_weight=w[of("down")])
            fields = dict(
                checkpointing=k[f"CHECKPOINTING_{policy}"], norm_epsilon=EPSILON, attention=attention, mlp=mlp, x=hidden[i],
                attention_norm=w[of("norm1")], mlp_norm=w[of("norm2")], out=hidden[i + 1],
            )
            layer = params("decoder_layer", **fields)
            size = self.size("decoder_layer_saved_size", layer)
            arena = self.room(size)
            layer.saved, layer.saved_size = arena.data_ptr(), size
            add(forward, "decoder_layer", **fields, saved=arena.data_ptr(), saved_size=size)
            attention_gradients = params("attention_block_backward", dqkv_weight=g[of("qkv")], dout_weight=g[of("out")])
            mlp_gradients = params("mlp_backward", dgate_up_weight=g[of("gate_up")], ddown_weight=g[of("down")])
            call = ctx.op(
                "decoder_layer_backward", forward=layer, attention=attention_gradients, mlp=mlp_gradients,
                dout=gradient, dattention_norm=g[of("norm1")], dmlp_norm=g[of("norm2")],
            )
            call.arena = arena
            names = [of(name) for name in ("qkv", "out", "gate_up", "down", "norm1", "norm2")]
            backward[:0] = [call, *self.once_made(names)]
        add(forward, "rms_norm", x=hidden[-1], weight=w["norm.weight"], out=normed, epsilon=EPSILON)
        flat = normed.view(-1, c["hidden"])
        add(
            forward, "linear_cross_entropy", x=flat, weight=w["embedding.weight"], targets=self.targets.view(-1), loss=self.loss,
            dx=gradient.view(-1, c["hidden"]), dweight=g["embedding.weight"], **self.of_loss(),
        )
        forward += self.once_made(["embedding.weight"])
        add(
            forward, "rms_norm_backward", x=hidden[-1], dout=gradient, weight=w["norm.weight"], epsilon=EPSILON,
            dweight=g["norm.weight"],
        )
        forward += self.once_made(["norm.weight"])
        backward += self.of_embedding(gradient)
        self.calls = forward + backward
        self.graph = None

    def room(self, size):
        """Zeros at a multiple of 256 bytes, as PyTorch gives them on a GPU and not on the CPU."""
        memory = torch.zeros(max(size, 1) + 255, dtype=torch.uint8, device=self.device)
        return memory[-memory.data_ptr() % 256 :][: max(size, 1)]

    def make_gradients(self):
        return {name: torch.zeros_like(w, dtype=self.gradient_dtype(name)) for name, w in self.weights.items()}

    def gradient_dtype(self, name):
        """The embedding's is that of the head, too, and has to be added to."""
        return self.of_layers if name.startswith("layers") else torch.float32

    def of_loss(self):
        """What the loss is told besides."""
        return {}

    def once_made(self, names):
        """Calls once gradients of these weights are there; of the embedding, as far as it is the head."""
        return []

    def of_embedding(self, gradient):
        """The last calls, which have the gradient of the first layer's input, and add to what the head left."""
        dweight = self.gradients["embedding.weight"]
        return [self.ctx.op("embedding_backward", ids=self.ids, dout=gradient, dweight=dweight, accumulate=1)]

    def size(self, function, params):
        import ctypes

        size = ctypes.c_size_t()
        self.ctx.library.call(function, self.ctx.handle, ctypes.byref(params), ctypes.byref(size))
        return size.value

    def trained(self):
        """Weights and gradients that the optimizer has."""
        return [(weight, self.gradients[name]) for name, weight in self.weights.items()]

    def of_optimizer(self):
        """What it is told besides."""
        return {}

    def make_optimizer(self, master):
        import ctypes

        library = self.ctx.library
        k, entry = library.constants, library.structs["unsloth_parameter"]
        trained = self.trained()
        table = (entry * len(trained))()
        for row, (weight, gradient) in zip(table, trained):
            row.weight, row.gradient = library.tensor(weight), library.tensor(gradient)
        group = (library.structs["unsloth_parameter_group"] * 1)()
        group[0].learning_rate, group[0].weight_decay = ADAMW["lr"], ADAMW["weight_decay"]
        params = library.struct(
            "optimizer_params", kind=k["OPTIMIZER_ADAM"], decoupled=1, beta1=ADAMW["betas"][0], beta2=ADAMW["betas"][1],
            epsilon=ADAMW["eps"], max_norm=MAX_NORM, parameters=ctypes.addressof(table),
            num_parameters=len(trained), groups=ctypes.addressof(group), num_groups=1, **self.of_optimizer(),
        )
        params.precision.master = k[f"MASTER_{master}"]
        size = self.size("optimizer_state_size", params)
        self.state = self.room(size)
        params.state, params.state_size = self.state.data_ptr(), size
        handle = ctypes.c_void_p()
        library.call("optimizer_create", self.ctx.handle, ctypes.byref(params), self.ctx.stream(), ctypes.byref(handle))
        return handle

    def queue(self):
        for call in self.calls:
            call()
        self.ctx.library.call("optimizer_step", self.optimizer, self.ctx.stream())

    def step(self, ids, targets):
        self.ids.copy_(ids)
        self.targets.copy_(targets)
        if self.graph is None:
            # Libraries load what they need at the first call; the weights are those of before.
            # They wait on the host: what is measured is the memory of a step.
            kept = [t.cpu() for t in (*self.weights.values(), self.state)]
            self.queue()
            torch.cuda.synchronize()
            for tensor, before in zip((*self.weights.values(), self.state), kept):
                tensor.copy_(before)
            del kept
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.queue()
        self.graph.replay()
        return self.loss

    def close(self):
        self.graph = None
        self.ctx.library.lib.unsloth_optimizer_destroy(self.optimizer)


# --- what is measured -------------------------------------------------------------------------------------


def text_batches(steps, batch, seq):
    """Bytes of the comparisons' sources as tokens."""
    texts = [path.read_bytes() for path in sorted(pathlib.Path(__file__).parent.glob("*.py"))]
    data = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).to("cuda", torch.int64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        at = torch.randint(0, data.numel() - seq - 1, (batch,), generator=generator).tolist()
        rows = torch.stack([data[a : a + seq + 1] for a in at])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def initial(c):
    torch.manual_seed(0)
    return {name: w.detach().clone() for name, w in Model(c).state_dict().items()}


def curves(ctx, record, steps=200, batch=4, seq=512):
    state = initial(SMOL)
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype, name in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        losses = {}
        for who in ("torch", OURS):
            if who == OURS:
                model = Ours(ctx, SMOL, state, dtype, batch, seq)
            else:
                model = Peer(SMOL, state, dtype, masters=dtype != torch.float32)
            losses[who] = [model.step(*b).item() for b in text_batches(steps, batch, seq)]
            getattr(model, "close", lambda: None)()
            del model
            gc.collect()
            torch.cuda.empty_cache()
        apart = [abs(a - b) for a, b in zip(losses["torch"], losses[OURS])]
        record.result.setdefault("curves", {})[name] = {
            "tokens_per_step": batch * seq, "losses": losses, "apart_first_50": max(apart[:50]), "apart": max(apart),
        }
        record.path.write_text(json.dumps(record.result, indent=1) + "\n")
        print(f"train loss {name}: {losses['torch'][0]:.4f} to {losses['torch'][-1]:.4f} and {losses[OURS][-1]:.4f}, "
              f"apart at most {max(apart[:50]):.2e} in 50 steps, {max(apart):.2e} in {steps}", flush=True)
        assert dtype != torch.float32 or max(apart[:50]) <= 1e-3, "the curves differ"


def measured(make, batch, seq, vocab):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = make()
    ids = torch.randint(0, vocab, (batch, seq + 1), device="cuda")
    one = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    for _ in range(4):
        loss = model.step(*one)
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = model.step(*one)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    loss = loss.item()
    assert math.isfinite(loss)
    getattr(model, "close", lambda: None)()
    return statistics.median(times), (torch.cuda.max_memory_allocated() - before) / 2**30, loss


def steps(ctx, record, c, name, batch, seq, wide=False):
    bf16 = torch.bfloat16
    exact = initial(c)
    state = {key: w.to(bf16) for key, w in exact.items()}
    contenders = {f"{OURS} {policy.lower()}": lambda p=policy: Ours(ctx, c, state, bf16, batch, seq, p) for policy in POLICIES}
    if wide:
        contenders[f"{OURS} none, f32"] = lambda: Ours(ctx, c, exact, torch.float32, batch, seq)
    contenders |= {
        "torch eager": lambda: Peer(c, state, bf16),
        "torch.compile": lambda: Peer(c, state, bf16, compiled=True),
        "torch.compile, f32 masters": lambda: Peer(c, exact, bf16, compiled=True, masters=True),
    }
    if peer("liger_kernel.ops.rms_norm"):
        contenders |= {
            "liger": lambda: Peer(c, state, bf16, liger=Liger()),
            "liger, f32 masters": lambda: Peer(c, exact, bf16, liger=Liger(), masters=True),
        }
    made = record.result.setdefault("steps", {})[f"{name} {batch}x{seq}"] = {}
    for who, make in contenders.items():
        try:
            seconds, gib, loss = measured(make, batch, seq, c["vocab"])
        except Exception as error:  # one that fails does not take the others along
            print(f"train {name} {who}: {error!r:.300}", flush=True)
            continue
        made[who] = {"ms": round(seconds * 1e3, 3), "tokens_per_s": round(batch * seq / seconds), "peak_gib": round(gib, 3)}
        record.path.write_text(json.dumps(record.result, indent=1) + "\n")
        print(f"train {name} {who}: {batch * seq / seconds:.0f} tokens/s, {gib:.2f} GiB, loss {loss:.3f}", flush=True)
        torch._dynamo.reset()


def compare(ctx):
    record = Record("train", ctx.library, METHOD, ("liger-kernel",))
    wanted = os.environ.get("TRAIN", "curves 135M 1B").split()
    if "curves" in wanted:
        curves(ctx, record)
    if "135M" in wanted:
        steps(ctx, record, SMOL, "135M", 8, 2048, wide=True)
    if "1B" in wanted:
        steps(ctx, record, BILLION, "1B", 4, 2048)
