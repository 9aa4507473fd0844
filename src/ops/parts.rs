//! Operations made of others: the problems of their parts, which run one after the other over one
//! workspace.
//!
//! What passes between parts lies at the beginning of the workspace. Behind it is room that the
//! parts share, as one has run before the next begins.

use arrayvec::ArrayVec;

use crate::backend::{Implementation, Stream};
use crate::context::{Context, Planned};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::problem::{
    Plan, attention, kv_cache, linear, mlp, norm, qk_norm_rope, rms_norm, rope, swiglu,
};
use crate::tensor::{RawTensor, Scratch, Workspace};

/// What a part and the whole call the same argument, in this order.
pub(crate) type Names = &'static [(&'static str, &'static str)];

/// Declares what a part may be.
macro_rules! problems {
    ($($kind:ident($problem:ty)),* $(,)?) => {
        // Problems lie where they are made; boxes would be allocated for every call.
        #[allow(clippy::large_enum_variant)]
        #[derive(Clone, Debug)]
        enum AnyProblem {
            $($kind($problem)),*
        }

        #[allow(clippy::large_enum_variant)] // as above
        enum AnyPlan<'a> {
            $($kind(<$problem as Planned>::Plan<'a>)),*
        }

        /// A problem that may be a part.
        pub(crate) trait IsPart {
            #[doc(hidden)]
            fn into_any(self) -> Any;
        }

        $(
            impl IsPart for $problem {
                fn into_any(self) -> Any {
                    Any(AnyProblem::$kind(self))
                }
            }
        )*

        impl AnyProblem {
            fn plan(self, ctx: &Context) -> Result<AnyPlan<'_>> {
                Ok(match self {
                    $(AnyProblem::$kind(problem) => AnyPlan::$kind(problem.plan(ctx)?)),*
                })
            }
        }

        impl AnyPlan<'_> {
            fn as_plan(&self) -> &dyn Plan {
                match self {
                    $(AnyPlan::$kind(plan) => plan),*
                }
            }
        }
    };
}

problems!(
    Mlp(mlp::Problem),
    Linear(linear::Problem),
    LinearBackward(linear::Backward),
    Swiglu(swiglu::Problem),
    SwigluBackward(swiglu::Backward),
    RmsNorm(rms_norm::Problem),
    NormBackward(norm::Backward),
    Rope(rope::Problem),
    QkNormRope(qk_norm_rope::Problem),
    QkNormRopeBackward(qk_norm_rope::Backward),
    Append(kv_cache::Append),
    Attention(attention::Problem),
    AttentionBackward(attention::Backward),
);

/// One of the problems that may be parts.
pub(crate) struct Any(AnyProblem);

/// A part: its problem or its plan, and names for the errors of both.
#[derive(Clone, Debug)]
struct Part<P> {
    is: P,
    names: Names,
}

/// Validated arguments of an operation of up to `N` parts, in the order in which they run.
#[derive(Clone, Debug)]
pub(crate) struct Parts<const N: usize> {
    op: &'static str,
    list: ArrayVec<Part<AnyProblem>, N>,
    /// The caller's workspace, or NULL where only a query is made.
    workspace: *mut u8,
    /// Bytes of it that are taken, and that ever were.
    taken: usize,
    most_taken: usize,
    /// Whether every part has to have all the workspace that it has use for, and takes no memory of
    /// the host's.
    exact: bool,
    any_batch: bool,
    idle: bool,
}

impl<const N: usize> Parts<N> {
    /// None yet; `op` is the name of the whole in errors.
    pub fn new(op: &'static str, workspace: &Workspace<'_>) -> Self {
        Parts {
            op,
            list: ArrayVec::new(),
            workspace: workspace.as_ptr(),
            taken: 0,
            most_taken: 0,
            exact: false,
            any_batch: false,
            idle: false,
        }
    }

    /// Needs all the workspace that parts have use for. A part then always runs in the same way, so
    /// that what is computed again has the same bits. On the host products need theirs too: none of
    /// them finds no memory when others have written.
    pub fn exactly(mut self) -> Self {
        self.exact = true;
        self
    }

    /// Stands for every batch of a cache that has as many tokens: it is asked about and not run.
    pub fn for_any_batch(&mut self) {
        self.any_batch = true;
    }

    /// There is nothing to do, and no workspace is needed for it.
    pub fn be_idle(&mut self) {
        self.idle = true;
    }

    /// Room in the workspace for a contiguous tensor, of a row for each of `x`'s.
    pub fn take(&mut self, dtype: DType, [rows, columns]: [usize; 2]) -> Result<RawTensor> {
        // What parts share, and what the caller lends, fit beside it.
        const MOST: usize = isize::MAX as usize / 2;
        let too_large = || {
            let problem = text!("has {rows} rows: the workspace would not fit the address space");
            Error::invalid(self.op, "x", problem)
        };
        let layout = Layout::contiguous(&[rows, columns]).map_err(|_| too_large())?;
        // Layouts are such that their sizes in bytes do not overflow.
        let size = (layout.span() * dtype.size()).next_multiple_of(Workspace::ALIGNMENT);
        if size > MOST - self.taken {
            return Err(too_large());
        }
        let ptr = self.workspace.wrapping_add(self.taken);
        self.taken += size;
        self.most_taken = self.most_taken.max(self.taken);
        Ok(RawTensor { ptr, dtype, layout })
    }

    /// As [`Parts::take`] if a part needs it; otherwise the tensor is described and lies nowhere.
    pub fn take_if(&mut self, needed: bool, dtype: DType, shape: [usize; 2]) -> Result<RawTensor> {
        if needed {
            return self.take(dtype, shape);
        }
        Ok(RawTensor {
            ptr: std::ptr::null_mut(),
            dtype,
            layout: Layout::contiguous(&shape)?,
        })
    }

    /// Bytes that are taken.
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Gives back what was taken since there were so many bytes: no part that is yet to come reads
    /// it.
    #[allow(dead_code)] // for compositions of blocks
    pub fn give_back(&mut self, taken: usize) {
        self.taken = taken;
    }

    /// What is not taken of the workspace, for a whole that is to be absorbed.
    pub fn rest(&self) -> Workspace<'static> {
        // SAFETY: none of it is lent: parts only learn where they lie.
        unsafe { Workspace::from_raw(self.workspace.wrapping_add(self.taken), 0) }
    }

    /// Adds the parts of a whole that was made over [`Parts::rest`], since when nothing was taken.
    pub fn absorb<const M: usize>(&mut self, whole: Result<Parts<M>>) -> Result<()> {
        let whole = named(self.op, whole, &[])?;
        if whole.idle {
            return Ok(());
        }
        self.most_taken = self.most_taken.max(self.taken + whole.most_taken);
        whole.list.into_iter().try_for_each(|part| self.add(part))
    }

    fn add(&mut self, part: Part<AnyProblem>) -> Result<()> {
        self.list.try_push(part).map_err(|_| Error::Internal {
            op: self.op,
            message: text!("has more than {N} parts"),
        })
    }

    /// Adds a part, or tells why there is none. Errors call arguments what the whole does.
    pub fn push<P: IsPart>(&mut self, problem: Result<P>, names: Names) -> Result<()> {
        let Any(is) = named(self.op, problem, names)?.into_any();
        self.add(Part { is, names })
    }
}

/// A part's result, its error being the whole's own: the argument is called what the whole calls
/// it.
pub(crate) fn named<T>(op: &'static str, result: Result<T>, names: Names) -> Result<T> {
    result.map_err(|error| error.within(op).renamed(names))
}

/// One plan for each part.
pub(crate) struct PartsPlan<'a, const N: usize> {
    op: &'static str,
    list: ArrayVec<Part<AnyPlan<'a>>, N>,
    /// Bytes of what passes between parts, of what they share at least, and of what they have use
    /// for.
    between: usize,
    shared: usize,
    useful: usize,
    exact: bool,
    idle: bool,
}

impl<const N: usize> Planned for Parts<N> {
    type Plan<'a> = PartsPlan<'a, N>;

    fn plan(self, ctx: &Context) -> Result<PartsPlan<'_, N>> {
        let op = self.op;
        let mut list = ArrayVec::new();
        let (mut shared, mut useful) = (0, 0);
        for Part { is, names } in self.list {
            let plan = named(op, is.plan(ctx), names)?;
            let of_part = match self.any_batch {
                true => plan.as_plan().useful_for_any(),
                false => plan.as_plan().useful(),
            };
            useful = named(op, of_part, names)?.max(useful);
            if self.exact {
                useful = plan.as_plan().without_allocating().max(useful);
            }
            shared = plan.as_plan().needed().max(shared);
            list.push(Part { is: plan, names });
        }
        Ok(PartsPlan {
            op,
            list,
            between: self.most_taken,
            shared: if self.exact { useful } else { shared },
            useful,
            exact: self.exact,
            idle: self.idle,
        })
    }
}

impl<const N: usize> Plan for PartsPlan<'_, N> {
    /// The most particular one of the parts'.
    fn implementation(&self) -> Implementation {
        let all = self
            .list
            .iter()
            .map(|part| part.is.as_plan().implementation());
        all.max_by_key(|i| *i as u32).unwrap_or(Implementation::Cpu)
    }

    fn needed(&self) -> usize {
        match self.idle {
            true => 0,
            false => self.between.saturating_add(self.shared),
        }
    }

    fn useful(&self) -> Result<usize> {
        Ok(match self.idle {
            true => 0,
            false => self.between.saturating_add(self.useful),
        })
    }

    /// The most that a part uses of what is left for all.
    fn used(&self, given: usize) -> Result<usize> {
        if self.idle {
            return Ok(0);
        }
        let left = given.saturating_sub(self.between);
        let mut shared = self.shared;
        for Part { is, names } in &self.list {
            let used = named(self.op, self.size_of(is.as_plan(), left), names)?;
            shared = shared.max(used);
        }
        Ok(self.between.saturating_add(shared))
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        if self.idle {
            return Ok(());
        }
        let shared = Scratch {
            ptr: scratch.ptr.wrapping_add(self.between),
            size: scratch.size.saturating_sub(self.between),
        };
        let probed = self.list.iter().filter(|_| self.exact);
        for Part { is, names } in probed {
            named(self.op, is.as_plan().probe(), names)?;
        }
        for Part { is, names } in &self.list {
            let launched = self.launch_one(is.as_plan(), shared, stream);
            named(self.op, launched, names)?;
        }
        Ok(())
    }
}

impl<const N: usize> PartsPlan<'_, N> {
    /// As much of `given` bytes as a call of its own would use for a part, or as keeps it from
    /// allocating.
    fn size_of(&self, plan: &dyn Plan, given: usize) -> Result<usize> {
        let needed = plan.needed();
        let mut used = needed;
        if given > needed {
            used = plan.used(given)?.clamp(needed, given);
        }
        Ok(match self.exact {
            true => plan.without_allocating().min(given).max(used),
            false => used,
        })
    }

    fn launch_one(&self, plan: &dyn Plan, shared: Scratch, stream: Stream) -> Result<()> {
        let scratch = match self.size_of(plan, shared.size)? {
            0 => Scratch::NONE,
            size => Scratch { size, ..shared },
        };
        plan.launch(scratch, stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a backend refuses when it chooses, or when it launches, is named as the whole names it.
    #[test]
    fn errors_of_parts_name_the_wholes_arguments() {
        let names: Names = &[("weight", "q_norm"), ("epsilon", "norm_epsilon")];
        for (argument, expected) in [
            ("weight", "attention_block: q_norm is odd"),
            ("epsilon", "attention_block: norm_epsilon is odd"),
            ("x", "attention_block: x is odd"),
        ] {
            let refused: Result<()> = Err(Error::unsupported("rms_norm", argument, "is odd"));
            let error = named("attention_block", refused, names).unwrap_err();
            assert_eq!(error.to_string(), expected);
        }
    }

    /// Tensors lie one behind the other, and the most that was taken counts.
    #[test]
    fn room_is_taken_in_aligned_pieces() {
        let mut parts = Parts::<1>::new("test", &Workspace::none());
        let at =
            |parts: &mut Parts<1>, shape| parts.take(DType::F16, shape).map(|t| t.ptr as usize);
        assert_eq!(at(&mut parts, [3, 5]).unwrap(), 0);
        assert_eq!(at(&mut parts, [0, 5]).unwrap(), 256);
        assert_eq!(at(&mut parts, [1, 128]).unwrap(), 256);
        assert_eq!(at(&mut parts, [1, 1]).unwrap(), 512);
        parts.give_back(256);
        assert_eq!(at(&mut parts, [1, 1]).unwrap(), 256);
        assert_eq!((parts.taken, parts.most_taken), (512, 768));
        let error = at(&mut parts, [1 << 31, 1 << 30]).unwrap_err().to_string();
        let expected = "test: x has 2147483648 rows: the workspace would not fit the address space";
        assert_eq!(error, expected);
    }
}
