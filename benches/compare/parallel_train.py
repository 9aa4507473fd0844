"""What two GPUs gain in training: a step whose batches they divide, and the loss of a vocabulary that they divide."""

import statistics
import time

import torch
import train
from common import OURS
from parallel_layer import numbers
from parallel_measure import all_reduced, of_ranks
from torch import distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

TINY = dict(hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, layers=3, vocab=1024)
STEPS = 12
HEAD = (8192, 4096, 128256)


class Divided(train.Ours):
    """A step of which every rank has as many of the sequences. Gradients of a layer lie behind each other and are added up on a
    stream of their own, while those of the layers before it are computed. Those of the embedding are the head's and a
    few rows: the head's are added up first, and ranks exchange what the rows are made of."""

    def __init__(self, r, c, state, dtype, batch, seq, **more):
        self.r, self.side = r, torch.cuda.Stream() if r.cuda else None
        self.tokens = torch.full((1,), float(r.size * batch * seq), device=r.device)
        super().__init__(r.ctx, c, state, dtype, batch, seq, **more)

    def make_gradients(self):
        self.buckets = {}
        return self.laid_out(self.buckets, self.gradient_dtype)

    def laid_out(self, buckets, dtype_of):
        """Tensors like the weights; those of a bucket lie behind each other in one of `buckets`, which ranks can divide."""
        of_buckets, tensors = {}, {}
        for name, w in self.weights.items():
            of_buckets.setdefault(self.bucket_of(name), []).append((name, w))
        for bucket, named in of_buckets.items():
            # Each, and each rank's part, begins at a multiple of 16 bytes, as kernels like it.
            sizes = [-(-w.numel() // 8) * 8 for _, w in named]
            sizes.append(-sum(sizes) % (8 * self.r.size))
            flat = buckets[bucket] = torch.zeros(sum(sizes), dtype=dtype_of(named[0][0]), device=self.device)
            for (name, w), part in zip(named, flat.split(sizes)):
                tensors[name] = part[: w.numel()].view(w.shape)
        return tensors

    @staticmethod
    def bucket_of(name):
        return ".".join(name.split(".")[:2]) if name.startswith("layers") else name

    def of_loss(self):
        return dict(denominator=self.tokens)

    def once_made(self, names):
        added = self.added(self.buckets[self.bucket_of(names[0])])
        if not self.r.cuda:
            return [added]

        def beside():
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                added()

        return [beside]

    def added(self, flat):
        return self.ctx.op("all_reduce", comm=self.r.comm, x=flat)

    def of_embedding(self, gradient):
        r, k = self.r, self.r.size
        ids, douts = (torch.zeros(k * t.shape[0], *t.shape[1:], dtype=t.dtype, device=self.device) for t in (self.ids, gradient))
        # The loss is a sum of ranks' parts, and nothing waits for it.
        calls = [
            self.ctx.op("all_gather", comm=r.comm, x=self.ids, out=ids),
            self.ctx.op("all_gather", comm=r.comm, x=gradient, out=douts),
            self.ctx.op("all_reduce", comm=r.comm, x=self.loss),
            self.join,
            self.ctx.op("embedding_backward", ids=ids, dout=douts, dweight=self.gradients["embedding.weight"], accumulate=1),
        ]
        return calls

    def join(self):
        if self.side:
            torch.cuda.current_stream().wait_stream(self.side)


class Sharded(Divided):
    """The same with a sharded optimizer, ZeRO's first stage (arXiv:1910.02054): a rank gets the sum of gradients for its part of every
    bucket, keeps moments and masters of that part alone, and all gather weights, which lie as gradients do. What is left of gradients
    outside its part nobody reads."""

    def make_gradients(self):
        gradients = super().make_gradients()
        self.flat = {}
        weights = self.laid_out(self.flat, lambda name: self.dtype)
        for name, w in weights.items():
            w.copy_(self.weights[name])
        self.weights = weights
        self.gathers = [self.ctx.op("all_gather", comm=self.r.comm, x=self.part(f), out=f) for f in self.flat.values()]
        return gradients

    def part(self, flat):
        return flat.chunk(self.r.size)[self.r.rank]

    def added(self, flat):
        return self.ctx.op("reduce_scatter", comm=self.r.comm, x=flat, out=self.part(flat))

    def trained(self):
        return [(self.part(self.flat[bucket]), self.part(gradients)) for bucket, gradients in self.buckets.items()]

    def of_optimizer(self):
        return dict(comm=self.r.comm)

    def queue(self):
        super().queue()
        for gather in self.gathers:
            gather()


def losses_of(model, batches):
    """On a GPU steps behind the first are replays of a graph."""
    found, step = [], model.queue
    for ids, targets in batches:
        model.ids.copy_(ids)
        model.targets.copy_(targets)
        step()
        found.append(model.loss.item())
        if model.loss.is_cuda and step == model.queue:
            model.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(model.graph):
                model.queue()
            step = model.graph.replay
    model.close()
    return found


def curves(r):
    """Steps of ranks that divide batches, and the same steps of one."""
    # Threads of the CPU share a generator.
    state = r.exchange(train.initial(TINY) if r.rank == 0 else None)[0]
    batch, seq = 2, 64 if r.cuda else 8
    generator = torch.Generator(r.device).manual_seed(4)
    ids = torch.randint(0, TINY["vocab"], (STEPS, r.size * batch, seq + 1), device=r.device, generator=generator)
    ids[1:] = ids[:1]  # the same text each time: the loss falls
    whole = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in ids]
    own = [tuple(t.chunk(r.size)[r.rank] for t in pair) for pair in whole]
    f32, bf16 = torch.float32, torch.bfloat16
    for dtype, of_layers, tolerance in ((f32, f32, 1e-4), (bf16, f32, 2e-2), (bf16, bf16, 2e-2)):
        name = f"data parallel {dtype}, gradients of layers {of_layers}"
        one = losses_of(train.Ours(r.ctx, TINY, state, dtype, r.size * batch, seq, of_layers=of_layers), whole)
        r.apart()
        for kind, ending in ((Divided, ""), (Sharded, ", sharded optimizer")):
            several = losses_of(kind(r, TINY, state, dtype, batch, seq, of_layers=of_layers), own)
            r.apart()
            apart = max(abs(a - b) / a for a, b in zip(one, several))
            if not (apart <= tolerance and one[-1] < 0.9 * one[0]):
                r.wrong.append(f"{name}{ending}, rank {r.rank}: losses {one} of one rank and {several}")
            if any(other != several for other in r.exchange(several)):
                r.wrong.append(f"{name}{ending}: ranks have different losses")
            if r.rank == 0:
                print(f"{name}{ending}: loss {one[0]:.4f} to {one[-1]:.4f} and {several[-1]:.4f}, apart {apart:.1e}", flush=True)


def steps(r):
    """As many sequences for each rank as one has alone."""
    curves(r)
    if not r.cuda:
        return
    c, batch, seq = train.BILLION, 4, 2048
    with torch.device(r.device):
        state = {name: w.to(torch.bfloat16) for name, w in train.initial(c).items()}
    torch.cuda.empty_cache()
    ids = torch.randint(0, c["vocab"], (batch, seq + 1), device=r.device)
    one_batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    peers = of_torch(r, c, state, batch, seq, one_batch)
    for of_layers, ending in ((torch.float32, ""), (torch.bfloat16, ", gradients of layers in bf16")):
        times, peaks = (dict(found) for found in peers)
        for name, make in (
            (f"{OURS} one GPU", lambda *args, **more: train.Ours(r.ctx, *args, **more)),
            (f"{OURS} data parallel", lambda *args, **more: Divided(r, *args, **more)),
            (f"{OURS} data parallel, sharded optimizer", lambda *args, **more: Sharded(r, *args, **more)),
        ):
            torch.cuda.reset_peak_memory_stats()
            model = make(c, state, torch.bfloat16, batch, seq, of_layers=of_layers)
            for tensor, of in zip((model.ids, model.targets), one_batch):
                tensor.copy_(of)
            times |= r.times({name: model.queue})
            peaks[name] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
            model.close()
            del model
            r.empty_cache()
        several = {name: name.split(" data parallel")[0] for name in times if "one GPU" not in name}
        scaling = {name: round(times[f"{who} one GPU"] / times[name], 4) for name, who in several.items()}
        rates = {name: round((1 if "one GPU" in name else r.size) * batch * seq / us * 1e6) for name, us in times.items()}
        r.row(
            f"training step of 1.24 B, {batch} x {seq} tokens a GPU, bf16{ending}", times, dtype="bf16", ranks=r.size, scaling=scaling,
            tokens_per_s=rates, peak_gib=peaks,
        )


def of_torch(r, c, state, batch, seq, one_batch):
    """Times of steps by PyTorch, alone and by DDP, also with its own sharded optimizer, and their memory. Gradients have the weights' dtype."""
    times, peaks = {}, {}
    for name in ("torch one GPU", "torch data parallel", "torch data parallel, sharded optimizer"):
        model = train.Peer(c, state, torch.bfloat16)
        if "sharded" in name:
            model.optimizer = ZeroRedundancyOptimizer(model.model.parameters(), torch.optim.AdamW, fused=True, **train.ADAMW)
        if "parallel" in name:
            model.forward = torch.nn.parallel.DistributedDataParallel(model.model, device_ids=[r.rank], gradient_as_bucket_view=True)
        torch.cuda.reset_peak_memory_stats()
        times[name] = wall(r, lambda: model.step(*one_batch))  # noqa: B023
        peaks[name] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        del model
        r.empty_cache()
    return times, peaks


def wall(r, step, rounds=6):
    """Microseconds of a step that cannot be captured."""
    taken = []
    for _ in range(rounds):
        r.exchange(None)
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - started) * 1e6)
    return max(r.exchange(statistics.median(taken[2:])))


def head(r):
    """Loss and gradients of a head of Llama-3-8B's."""
    tokens, hidden, vocab = HEAD if r.cuda else (32, 64, 80 * r.size)
    bf16 = torch.bfloat16
    x = numbers(r.device, bf16, tokens, hidden, seed=2)
    weight = numbers(r.device, bf16, vocab, hidden, seed=3, scale=2 * hidden**-0.5)
    targets = torch.randint(0, vocab, (tokens,), device=r.device, generator=torch.Generator(r.device).manual_seed(5))
    begin, own = r.rank * vocab // r.size, vocab // r.size
    part = weight[begin : begin + own].contiguous()
    to = dict(parallel=r.parallel(), vocab_begin=begin, vocab_size=vocab)
    made = {}
    for name, w, more in ((f"{OURS} one GPU", weight, {}), (f"{OURS} vocabulary parallel", part, to)):
        r.apart()
        loss, dx, dweight = torch.zeros(1, device=r.device), torch.empty_like(x), torch.empty_like(w)
        made[name] = r.ctx.op("linear_cross_entropy", x=x, weight=w, targets=targets, loss=loss, dx=dx, dweight=dweight, **more), loss, dx
    contenders = {name: call for name, (call, _, _) in made.items()}
    for call in contenders.values():
        call()
    r.synchronize()
    (_, loss, dx), (_, loss_of_ranks, dx_of_ranks) = made.values()
    off = (dx.float() - dx_of_ranks.float()).abs().max().item() / dx.float().abs().max().item()
    if not (off < 5e-2 and abs(loss.item() - loss_of_ranks.item()) < 1e-3 * loss.item()):
        r.wrong.append(f"head, rank {r.rank}: loss {loss.item()} and {loss_of_ranks.item()}, dx is {off:.3f} away")
    if r.cuda:
        contenders["torch one GPU"] = torch_head(x, weight, targets, 0, lambda t: t, lambda t: t)
        contenders["torch vocabulary parallel"] = torch_head(x, part, targets, begin, all_reduced, greatest)
        for name in ("torch one GPU", "torch vocabulary parallel"):
            theirs = contenders[name]()[0].item()
            if not abs(loss.item() - theirs) < 1e-2 * loss.item():
                r.wrong.append(f"head, rank {r.rank}: {name} has loss {theirs}, ours is {loss.item()}")
    times = r.times(contenders)
    about = dict(dtype="bf16", flops_of_all=6 * tokens * hidden * vocab, **of_ranks(r, times))
    r.row(f"linear_cross_entropy {tokens}x{hidden}x{vocab}, loss and gradients", times, **about)


def greatest(t):
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t


def torch_head(x, weight, targets, begin, summed, maximal):
    """As Megatron divides it: three reductions of a number a token, and the input's gradient."""

    def run():
        with torch.no_grad():
            logits = torch.nn.functional.linear(x, weight).float()
            logits.sub_(maximal(logits.amax(-1, keepdim=True)))
            own = targets - begin
            there = (own >= 0) & (own < weight.shape[0])
            own = own.clamp(0, weight.shape[0] - 1)[:, None]
            of_target = summed(torch.where(there[:, None], logits.gather(1, own), 0.0))
            total = summed(logits.exp_().sum(-1, keepdim=True))
            loss = (total.log() - of_target).mean()
            logits.div_(total).scatter_add_(1, own, -there[:, None].float())
            gradient = logits.mul_(1 / x.shape[0]).to(x.dtype)
            return loss, summed(gradient @ weight), gradient.T @ x

    return run
