//! Norms and rotation of queries and keys, on the way to attention and back: heads that have both
//! get them in one pass.

use super::backward::Call;
use super::views::{Heads, Views, view, view_mut};
use super::{OP, Params};
use crate::error::{Error, Result, text};
use crate::ops::operation::Operation;
use crate::ops::parts::{Names, Parts, named};
use crate::ops::qk_norm_rope;
use crate::ops::rms_norm;
use crate::ops::rope::{self, Positions};
use crate::problem::{self, norm};
use crate::tensor::{InOut, RawTensor, TensorMut, TensorRef, Workspace};

const OF_NORMS: [Names; 2] = [
    &[
        ("weight", "q_norm"),
        ("weight_offset", "norm_weight_offset"),
        ("epsilon", "norm_epsilon"),
    ],
    &[
        ("weight", "k_norm"),
        ("weight_offset", "norm_weight_offset"),
        ("epsilon", "norm_epsilon"),
    ],
];
const OF_ROPE: Names = &[("q", "x"), ("k", "x")];
const OF_ONE_PASS: Names = &[
    ("q", "x"),
    ("k", "x"),
    ("q_weight", "q_norm"),
    ("k_weight", "k_norm"),
    ("weight_offset", "norm_weight_offset"),
    ("epsilon", "norm_epsilon"),
];
const OF_NORMS_BACK: [Names; 2] = [
    &[("dout", "x"), ("dx", "x"), ("dweight", "dq_norm")],
    &[("dout", "x"), ("dx", "x"), ("dweight", "dk_norm")],
];
const OF_ONE_PASS_BACK: Names = &[
    ("q", "x"),
    ("k", "x"),
    ("dq_out", "x"),
    ("dk_out", "x"),
    ("q_weight", "q_norm"),
    ("k_weight", "k_norm"),
    ("weight_offset", "norm_weight_offset"),
    ("epsilon", "norm_epsilon"),
    ("dq_weight", "dq_norm"),
    ("dk_weight", "dk_norm"),
];

impl<'p> Params<'p> {
    /// The gains of queries (0) and keys (1).
    pub(super) fn norm(&self, which: usize) -> Option<TensorRef<'p>> {
        [self.q_norm, self.k_norm][which]
    }

    /// Whether queries or keys are normalised, which loses what they were.
    pub(super) fn normalises(&self) -> bool {
        self.q_norm.is_some() || self.k_norm.is_some()
    }

    /// Whether heads of queries or keys are normalised one by one, and not all of a token together.
    pub(super) fn normalises_heads(&self, heads: &Heads, which: usize) -> Result<bool> {
        let Some(weight) = self.norm(which) else {
            return Ok(false);
        };
        let (head_dim, columns) = (self.head_dim, heads.columns()[which]);
        match weight.layout().shape() {
            [n] if *n == head_dim => Ok(true),
            [n] if *n == columns => Ok(false),
            shape => {
                let problem = text!("has shape {shape:?}, allowed: [{head_dim}] or [{columns}]");
                Err(Error::invalid(OP, ["q_norm", "k_norm"][which], problem))
            }
        }
    }

    /// Whether queries or keys are rotated before attention: a cache rotates keys when it takes them.
    fn rotates(&self, which: usize) -> bool {
        self.rotation.is_some() && (which == 0 || self.cache.is_none())
    }

    /// Whether queries and keys are normalised and rotated in one pass.
    fn in_one_pass(&self, heads: &Heads) -> Result<[bool; 2]> {
        let [q, k] =
            [0, 1].map(|which| Ok(self.rotates(which) && self.normalises_heads(heads, which)?));
        Ok([q?, k?])
    }

    /// Whether the cache rotates queries with the keys that it takes: those that were not normalised in the same pass.
    pub(super) fn rotates_with_keys(&self, heads: &Heads) -> Result<bool> {
        Ok(self.cache.is_some() && self.rotates(0) && !self.in_one_pass(heads)?[0])
    }

    /// Where tokens stand, for the rotation.
    fn stand(&self) -> Positions<'p> {
        match &self.cache {
            Some(layer) => Positions::PerToken(layer.batch.positions),
            None => self.positions,
        }
    }

    /// Adds norms and rotation, of queries, and of keys.
    pub(super) fn push_turning<const N: usize>(
        &self,
        views: &Views,
        parts: &mut Parts<N>,
    ) -> Result<()> {
        let in_one_pass = self.in_one_pass(&views.heads)?;
        for which in 0..2 {
            if let Some(weight) = self.norm(which).filter(|_| !in_one_pass[which]) {
                let norm = rms_norm::Params {
                    x: views.turning(|all| self.rows_of_norm(views, all, which))?,
                    residual: None,
                    weight: Some(weight),
                    weight_offset: self.norm_weight_offset,
                    epsilon: self.norm_epsilon,
                };
                parts.push(norm.problem(), OF_NORMS[which])?;
            }
        }
        let Some(rotation) = self.rotation else {
            return Ok(());
        };
        let heads = |all: &RawTensor, which| views.batch_if_any(views.heads_of(all, which)?);
        if in_one_pass.contains(&true) {
            let of = |which: usize| {
                let pair = || views.turning(|all| heads(all, which));
                in_one_pass[which].then(pair).transpose()
            };
            let both = qk_norm_rope::Params {
                q: of(0)?,
                k: of(1)?,
                q_weight: self.q_norm.filter(|_| in_one_pass[0]),
                k_weight: self.k_norm.filter(|_| in_one_pass[1]),
                weight_offset: self.norm_weight_offset,
                epsilon: self.norm_epsilon,
                positions: self.stand(),
                rotation,
            };
            parts.push(both.problem(), OF_ONE_PASS)?;
        }
        let of = |which: usize| {
            // A cache takes what is left of its tokens.
            let rotates = self.rotates(which) && !in_one_pass[which] && self.cache.is_none();
            let pair = || match (&views.turned, self.norm(which)) {
                // What was normalised lies there already.
                (Some(turned), Some(_)) => Ok(InOut::InPlace(heads(turned, which)?)),
                _ => views.turning(|all| heads(all, which)),
            };
            rotates.then(pair).transpose()
        };
        match self.rope_problem([of(0)?, of(1)?], false)? {
            Some(rope) => parts.push(Ok(rope), OF_ROPE),
            None => Ok(()),
        }
    }

    /// The rows of queries or keys that are normalised, in a tensor that has both side by side.
    fn rows_of_norm(
        &self,
        views: &Views,
        all: &RawTensor,
        which: usize,
    ) -> Result<TensorMut<'static>> {
        match self.normalises_heads(&views.heads, which)? {
            true => views.heads_of(all, which),
            false => views.flat_of(all, which),
        }
    }

    /// A rotation of queries and keys, or back, if there is something to rotate.
    fn rope_problem(
        &self,
        [q, k]: [Option<InOut<'static>>; 2],
        inverse: bool,
    ) -> Result<Option<problem::rope::Problem>> {
        let Some(rotation) = self.rotation.filter(|_| q.is_some() || k.is_some()) else {
            return Ok(None);
        };
        let rope = rope::Params {
            q,
            k,
            positions: self.stand(),
            rotation,
            inverse,
        };
        named(OP, rope.problem(), OF_ROPE).map(Some)
    }
}

impl Views {
    /// A part of queries and keys before and after norms and rotation.
    fn turning(
        &self,
        part: impl Fn(&RawTensor) -> Result<TensorMut<'static>>,
    ) -> Result<InOut<'static>> {
        let x = part(&self.qkv)?;
        Ok(match &self.turned {
            None => InOut::InPlace(x),
            Some(turned) => InOut::Apart {
                // SAFETY: as in `Views::flat_of`.
                input: unsafe { view(&x) },
                output: part(turned)?,
            },
        })
    }
}

impl Call<'_, '_> {
    /// Adds the way back through rotation and norms, in place, as far as that is needed: first what
    /// may find no memory.
    pub(super) fn push_rotation_back<const N: usize>(
        &self,
        all: &RawTensor,
        parts: &mut Parts<N>,
    ) -> Result<()> {
        let (forward, views) = (self.forward, &self.views);
        let in_one_pass = forward.in_one_pass(&views.heads)?;
        let heads = |of: &RawTensor, which: usize| views.batch_if_any(views.heads_of(of, which)?);
        let gradients = |which: usize, wanted: bool| {
            let pair = || Ok(InOut::InPlace(heads(all, which)?));
            wanted.then(pair).transpose()
        };
        let needs = [0, 1].map(|which| self.wanted.needs(which));
        let [q, k] = [0, 1].map(|which| gradients(which, needs[which] && !in_one_pass[which]));
        if let Some(rope) = forward.rope_problem([q?, k?], true)? {
            parts.push(Ok(rope), OF_ROPE)?;
        }
        let [q, k] = [0, 1].map(|which| needs[which] && in_one_pass[which]);
        let Some(rotation) = forward.rotation.filter(|_| q || k) else {
            return Ok(());
        };
        let raw = |which: usize, wanted: bool| -> Result<Option<TensorRef<'static>>> {
            let x = wanted.then(|| heads(&views.qkv, which)).transpose()?;
            // SAFETY: as in `Views::flat_of`.
            Ok(x.map(|x| unsafe { view(&x) }))
        };
        // SAFETY: outputs of the caller's, described once more for a problem.
        let [dq_weight, dk_weight] = (self.wanted.norms.each_ref())
            .map(|dweight| dweight.as_ref().map(|dweight| unsafe { view_mut(dweight) }));
        let both = qk_norm_rope::backward::Params {
            q: raw(0, q)?,
            dq_out: gradients(0, q)?,
            k: raw(1, k)?,
            dk_out: gradients(1, k)?,
            q_weight: forward.q_norm.filter(|_| q),
            k_weight: forward.k_norm.filter(|_| k),
            weight_offset: forward.norm_weight_offset,
            epsilon: forward.norm_epsilon,
            positions: forward.stand(),
            rotation,
            dq_weight: dq_weight.filter(|_| q),
            dk_weight: dk_weight.filter(|_| k),
            accumulate: self.accumulate,
            workspace: Workspace::none(),
        };
        parts.push(both.problem(), OF_ONE_PASS_BACK)
    }

    /// Adds the norms that are apart from the rotation, in place.
    pub(super) fn push_norms_back<const N: usize>(
        &self,
        all: &RawTensor,
        parts: &mut Parts<N>,
    ) -> Result<()> {
        let (forward, views) = (self.forward, &self.views);
        let in_one_pass = forward.in_one_pass(&views.heads)?;
        for which in 0..2 {
            let apart = self.wanted.needs(which) && !in_one_pass[which];
            let Some(weight) = forward.norm(which).filter(|_| apart) else {
                continue;
            };
            let dout = forward.rows_of_norm(views, all, which)?.raw();
            let norm = norm::Backward {
                centered: false,
                x: forward.rows_of_norm(views, &views.qkv, which)?.raw(),
                dout,
                dx: dout,
                dresidual: None,
                weight: Some(weight.raw()),
                weight_offset: forward.norm_weight_offset,
                epsilon: forward.norm_epsilon,
                parameters: norm::Parameters {
                    dweight: self.wanted.norms[which],
                    dbias: None,
                    accumulate: self.accumulate,
                },
            };
            parts.push(Ok(norm), OF_NORMS_BACK[which])?;
        }
        Ok(())
    }
}
