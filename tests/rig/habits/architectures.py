"""What people build: attention, experts, skips, codebooks, masks, recurrent cells."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from tests.rig.habits.registry import WIDTH, WORDS, Blocks, blocks, habit


@habit("tok", "toky")
class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(WORDS, WIDTH)
        self.q = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.h = nn.Linear(WIDTH, WORDS)
        t = torch.outer(torch.arange(16.0), 1 / 10 ** (torch.arange(0, WIDTH // 2, 2) / 4))
        self.register_buffer("cos", t.cos(), persistent=False)
        self.register_buffer("sin", t.sin(), persistent=False)
        self.register_buffer("mask", torch.full((16, 16), float("-inf")).triu(1))

    def rot(self, x):
        a, b = x[..., ::2], x[..., 1::2]
        c, s = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)

    def forward(self, x):
        h = self.e(x)
        B, T, _ = h.shape
        for layer in self.q:
            q, k, v = layer(h).reshape(B, T, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
            a = (self.rot(q) @ self.rot(k).transpose(-1, -2) / 2 + self.mask[:T, :T]).softmax(-1)
            h = h + (a @ v).transpose(1, 2).reshape(B, T, WIDTH)
        return self.h(h)


class Frozen(nn.Module):
    """an encoder that came trained, in eval mode inside of a model in train mode"""

    def __init__(self):
        super().__init__()
        self.e, self.h = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.e.requires_grad_(False)
        self.t = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1, batch_first=True).requires_grad_(False)
        self.t.eval()

    def forward(self, x):
        return self.h(self.t(self.e(x)))


@habit("tok", "toky", refused="torch.backends.mha.set_fastpath_enabled(False) at the top")
class FrozenEncoder(Frozen):
    pass


@habit("tok", "toky", refused="torch.backends.mha.set_fastpath_enabled(False) at the top")
class FrozenAttention(Frozen):
    def __init__(self):
        super().__init__()
        self.t = nn.MultiheadAttention(WIDTH, 2, 0.1, batch_first=True).requires_grad_(False).eval()

    def forward(self, x):
        h = self.e(x)
        return self.h(self.t(h, h, h)[0])


@habit("tok", "toky")
class FrozenOverTrained(Frozen):
    """where a gradient passes through, torch has no other kernels"""

    def __init__(self):
        super().__init__()
        self.e.requires_grad_(True)


@habit("tok", "toky")
class RelativePositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(WORDS, WIDTH)
        self.table = nn.Parameter(torch.zeros(9, 2))
        i = torch.arange(5)
        self.register_buffer("idx", i[:, None] - i[None] + 4)
        self.q = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.h = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        h = self.e(x)
        B, T, _ = h.shape
        for layer in self.q:
            q, k, v = layer(h).view(B, T, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4).unbind(0)
            bias = self.table[self.idx.view(-1)].view(T, T, 2).permute(2, 0, 1)
            h = h + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(B, T, WIDTH)
        return self.h(h)


@habit({"src": "tok", "tgt": "tok", "pad": "pad"}, "toky")
class EncoderAndDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.enc = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1, batch_first=True) for _ in range(2))
        self.dec = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.1, batch_first=True) for _ in range(2))
        self.h = nn.Linear(WIDTH, WORDS)

    def forward(self, src, tgt, pad=None):
        m = self.e(src)
        kp = None if pad is None else ~pad
        for layer in self.enc:
            m = layer(m, src_key_padding_mask=kp)
        t = self.e(tgt)
        cm = nn.Transformer.generate_square_subsequent_mask(t.shape[1])
        for layer in self.dec:
            t = layer(t, m, tgt_mask=cm, memory_key_padding_mask=kp, tgt_is_causal=True)
        return self.h(t)


@habit("tok", "toky")
class FullTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(WORDS, WIDTH)
        self.t = nn.Transformer(WIDTH, 2, 2, 2, 16, 0.1, batch_first=True)
        self.h = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        e = self.e(x)
        return self.h(self.t(e, e.flip(1)))


@habit("img", "cls")
class WeightStandard(nn.Module):
    """weight standardisation, squeeze-excite, layer scale, stochastic depth"""

    def __init__(self):
        super().__init__()
        self.s = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.c = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(3))
        self.f = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.g = nn.ParameterList(nn.Parameter(1e-1 * torch.ones(WIDTH)) for _ in range(3))
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        h = self.s(x)
        for c, f, g in zip(self.c, self.f, self.g):
            w = c.weight
            w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
            z = F.relu(F.group_norm(F.conv2d(h, w, c.bias, padding=1), 2))
            z = z * torch.sigmoid(f(z.mean((2, 3))))[:, :, None, None] * g[:, None, None]
            if self.training:
                keep = torch.empty(z.shape[0], 1, 1, 1).bernoulli_(0.8)
                z = z * keep / 0.8
            h = h + z
        return self.h(h.mean((2, 3)))


@habit("tok", "toky")
class ExpertsWithCapacity(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(WORDS, WIDTH)
        self.g = nn.Linear(WIDTH, 3)
        self.x = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.l = nn.Linear(WIDTH, WIDTH)
        self.h = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        h = self.e(x)
        B, T, _ = h.shape
        f = h.reshape(-1, WIDTH)
        p = self.g(f).softmax(-1)
        w, i = p.max(-1)
        one = F.one_hot(i, 3)
        pos = one.cumsum(0) * one
        keep = (pos <= 4) & (pos > 0)
        out = sum((ex(f) * (keep[:, k] * w)[:, None]) for k, ex in enumerate(self.x))
        return self.h(self.l(h + out.view(B, T, WIDTH)))


@habit("tok", "toky", refused="makes a tensor whose size follows")
class ExpertsByIndex(nn.Module):
    """experts gather their tokens by mask: data-dependent shapes"""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(WORDS, WIDTH)
        self.g = nn.Linear(WIDTH, 3)
        self.x = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.h = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        h = self.e(x)
        f = h.reshape(-1, WIDTH)
        w, i = self.g(f).softmax(-1).max(-1)
        out = torch.zeros_like(f)
        for k, ex in enumerate(self.x):
            at = (i == k).nonzero()[:, 0]
            out = out.index_add(0, at, ex(f[at]) * w[at, None])
        return self.h(h + out.view_as(h))


@habit("img1", "cls")
class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        c = [1, 4, 8]
        self.d = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(True)) for a, b in pairwise(c)
        )
        self.m = nn.Conv2d(8, 8, 3, padding=1)
        self.u = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)])
        self.k = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 4, 1)])
        self.h = nn.Linear(4, 4)

    def forward(self, x):
        s = []
        for d in self.d:
            x = d(x)
            s.append(x)
            x = F.max_pool2d(x, 2)
        x = self.m(x)
        for u, k in zip(self.u, self.k):
            x = k(torch.cat([u(x), s.pop()], 1))
        return self.h(F.adaptive_avg_pool2d(x, 1).flatten(1))


def contrast(o, y):
    a, b = o
    return F.cosine_embedding_loss(a, b, (y % 2) * 2.0 - 1)


@habit(("img", "img"), "cls", loss=contrast)
class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, WIDTH),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, a, b):
        return self.n(a), self.n(b)


@habit("vec", "cls", refused="aten._conj.default' is not on the allow-list")
class ComplexNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat)
        self.b = nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat)
        self.h = nn.Linear(2 * WIDTH, 4)

    def forward(self, x):
        z = self.b(torch.polar(torch.ones_like(x), x) * self.a(x.to(torch.cfloat)).conj())
        return self.h(torch.view_as_real(z).flatten(1))


@habit("vec", "cls", refused="is sparse, and graphs have dense tensors only")
class SparseMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = blocks(2)
        self.l = nn.Linear(WIDTH, WIDTH)
        self.h = nn.Linear(WIDTH, 4)
        self.register_buffer("mask", (torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 3 > 0))
        self.register_buffer("adj", torch.eye(WIDTH).to_sparse())

    def forward(self, x):
        return self.h(torch.sparse.mm(self.adj, F.linear(self.b(x), self.l.weight * self.mask, self.l.bias).t()).t())


@habit(("tok", "len"), "cls", refused="give the padded sequenc")
class PackedSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(WORDS, WIDTH)
        self.r = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x, n):
        p = nn.utils.rnn.pack_padded_sequence(self.e(x), n, batch_first=True, enforce_sorted=False)
        return self.h(self.r(p)[1][-1])


@habit(("tok", "padf"), "cls")
class MaskedMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.a = nn.MultiheadAttention(WIDTH, 2, 0.1, batch_first=True)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x, m):
        e = self.e(x)
        a, w = self.a(e, e, e, key_padding_mask=m == 0)
        return self.h((a * m[..., None]).sum(1) / m.sum(1, keepdim=True) + w.mean((1, 2))[:, None])


@habit("tok", "cls", refused="nn.Embedding(...)(ids).mean(1)")
class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")
        self.b = blocks(2)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.h(self.b(self.e(x)))


@habit("tok", "cls", refused="sparse")
class SparseEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.b = blocks(2)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.h(self.b(self.e(x).mean(1)))


def vae(o, y):
    r, mu, lv = o
    return F.mse_loss(r, y) - 0.5 * (1 + lv - mu.pow(2) - lv.exp()).mean()


@habit("vec", "vecy", loss=vae)
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Linear(WIDTH, 2 * WIDTH)
        self.m = nn.Linear(WIDTH, 4)
        self.d = nn.Sequential(nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        mu, lv = self.m(F.glu(self.e(x))).chunk(2, -1)
        return self.d(mu + torch.randn_like(mu) * (lv / 2).exp()), mu, lv


@habit("img", "img3y", loss=lambda o, y: F.l1_loss(*o))
class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.t = nn.Embedding(10, 3)
        self.register_buffer("ab", torch.linspace(0.99, 0.01, 10))

    def forward(self, x):
        t = torch.randint(0, 10, (x.shape[0],))
        n = torch.randn_like(x)
        a = self.ab[t].view(-1, 1, 1, 1)
        z = a.sqrt() * x + (1 - a).sqrt() * n
        for c in self.c:
            z = z + F.silu(c(z) + self.t(t)[:, :, None, None])
        return z, n


@habit("vec", "vecy", loss=lambda o, y: F.mse_loss(o[0], y) + o[1])
class VectorQuantized(nn.Module):
    """VectorQuantized-VAE with EMA codebook"""

    def __init__(self):
        super().__init__()
        self.e = blocks(2)
        self.register_buffer("code", torch.randn(6, WIDTH))
        self.register_buffer("n", torch.ones(6))
        self.register_buffer("s", torch.randn(6, WIDTH))
        self.d = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        z = self.e(x)
        i = torch.cdist(z, self.code).argmin(1)
        q = self.code[i]
        if self.training:
            with torch.no_grad():
                o = F.one_hot(i, 6).float()
                self.n.mul_(0.9).add_(o.sum(0), alpha=0.1)
                self.s.mul_(0.9).add_(o.t() @ z, alpha=0.1)
                self.code.copy_(self.s / self.n[:, None])
        return self.d(z + (q - z).detach()), 0.25 * F.mse_loss(z, q.detach())


@habit("seq", "cls")
class Reshapes(nn.Module):
    """patchify and pixel shuffle by reshape, einsum, unfold, roll (Swin)"""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH * 2, WIDTH)
        self.w = nn.Parameter(torch.randn(2, WIDTH // 2, WIDTH // 2) * 0.3)
        self.b = blocks(2)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        h = x.roll(1, 1)[:, :4].unfold(1, 2, 2).flatten(2)
        h = self.a(h)
        h = torch.einsum("bthd,hde->bthe", h.unflatten(-1, (2, -1)), self.w).flatten(-2)
        return self.h(self.b(h).mean(1))


@habit("vec", "cls", refused="torch.where or a mask")
class FixedPoint(nn.Module):
    """fixed-point loop with tolerance"""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        z = torch.zeros_like(x)
        for _ in range(10):
            n = torch.tanh(0.5 * self.l(z) + x)
            if (n - z).abs().max() < 1e-2:
                break
            z = n
        return self.h(z)


@habit("vec", "cls")
class RowsSeeRows(Blocks):
    """rows see one another"""

    def forward(self, x):
        h = F.normalize(self.b(x), dim=-1)
        return self.h((h @ h.t()).softmax(-1) @ h)


@habit("vec", "cls")
class OneBlockManyTimes(nn.Module):
    """ALBERT: one block many times, and a weight used by function, too"""

    def __init__(self):
        super().__init__()
        self.b = blocks(1)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        for _ in range(5):
            x = x + self.b(x)
        return self.h(F.linear(x, self.b[0][1].weight.t()))


@habit("vec", "cls")
class CellLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.LSTMCell(2, WIDTH)
        self.h = nn.Linear(WIDTH, 4)
        self.h0 = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x):
        h, c = self.h0.expand(x.shape[0], -1), x.new_zeros(x.shape[0], WIDTH)
        for t in x.view(-1, 4, 2).unbind(1):
            h, c = self.c(t, (h, c))
        return self.h(h)


@habit("vec", "cls")
class TopK(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = blocks()
        self.h = nn.Linear(3, 4)

    def forward(self, x):
        h = self.b(x)
        return self.h(h.gather(1, h.topk(3, 1).indices.sort(1).values))


@habit("vec", "cls", refused="use a mask of fixed size")
class MaskSelected(Blocks):
    def forward(self, x):
        h = self.b(x)
        return self.h(h + h[h > 0.1].mean())


@habit("seq", "cls")
class MaskedTokens(nn.Module):
    """mask tokens (MAE): random order by argsort of noise"""

    def __init__(self):
        super().__init__()
        self.e = nn.Linear(WIDTH, WIDTH)
        self.m = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.b = blocks(2)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x):
        h = self.e(x)
        B, T, _ = h.shape
        ids = torch.rand(B, T).argsort(1)
        back = ids.argsort(1)
        k = h.gather(1, ids[:, :2, None].expand(-1, -1, WIDTH))
        k = self.b(k)
        return self.h(
            torch.cat([k, self.m.expand(B, T - 2, -1)], 1).gather(1, back[..., None].expand(-1, -1, WIDTH)).mean(1)
        )
