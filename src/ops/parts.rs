//! Operations made of others: the problems of their parts, which run one after the other over one
//! workspace.
//!
//! What passes between parts lies at the beginning of the workspace. Behind it is room that the
//! parts share, as one has run before the next begins.

use arrayvec::ArrayVec;

use crate::alloc::push;
use crate::backend::{Implementation, Stream};
use crate::context::{Collective, Context, Planned};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::problem::{
    Plan, accumulate, attention, attention_merge, cast, cross_entropy, embedding, kv_cache, linear,
    mlp, norm, qk_norm_rope, rms_norm, rope, swiglu,
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
        enum AnyProblem<'t> {
            $($kind($problem),)*
            Collective(Collective<'t>),
        }

        #[allow(clippy::large_enum_variant)] // as above
        enum AnyPlan<'t, 'a> {
            $($kind(<$problem as Planned>::Plan<'a>),)*
            Collective(<Collective<'t> as Planned>::Plan<'a>),
        }

        /// A problem that may be a part.
        pub(crate) trait IsPart {
            #[doc(hidden)]
            fn into_any<'t>(self) -> Any<'t>;
        }

        $(
            impl IsPart for $problem {
                fn into_any<'t>(self) -> Any<'t> {
                    Any(AnyProblem::$kind(self))
                }
            }
        )*

        impl<'t> AnyProblem<'t> {
            fn plan(self, ctx: &Context) -> Result<AnyPlan<'t, '_>> {
                Ok(match self {
                    $(AnyProblem::$kind(problem) => AnyPlan::$kind(problem.plan(ctx)?),)*
                    AnyProblem::Collective(problem) => AnyPlan::Collective(problem.plan(ctx)?),
                })
            }
        }

        impl AnyPlan<'_, '_> {
            fn as_plan(&self) -> &dyn Plan {
                match self {
                    $(AnyPlan::$kind(plan) => plan,)*
                    AnyPlan::Collective(plan) => plan,
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
    CrossEntropyPart(cross_entropy::Part),
    CrossEntropyWhole(cross_entropy::Whole),
    Embedding(embedding::Problem),
    EmbeddingBackward(embedding::Backward),
    Attention(attention::Problem),
    AttentionBackward(attention::Backward),
    AttentionMerge(attention_merge::Problem),
    Cast(cast::Problem),
    Accumulate(accumulate::Problem),
);

/// One of the problems that may be parts.
pub(crate) struct Any<'t>(AnyProblem<'t>);

/// A part: its problem or its plan, and names for the errors of both.
#[derive(Clone, Debug)]
struct Part<P> {
    is: P,
    names: Names,
}

/// Validated arguments of an operation of up to `N` parts, in the order in which they run.
#[derive(Clone, Debug)]
pub(crate) struct Parts<'t, const N: usize> {
    op: &'static str,
    /// What is gathered first and added up last, beside the list: calls that no ranks divide have less
    /// to carry about.
    first: Option<Part<Collective<'t>>>,
    list: ArrayVec<Part<AnyProblem<'t>>, N>,
    /// Those that the list has no room for, where a whole may have any number.
    more: Option<Vec<Part<AnyProblem<'t>>>>,
    last: Option<Part<Collective<'t>>>,
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

impl<'t, const N: usize> Parts<'t, N> {
    /// None yet; `op` is the name of the whole in errors.
    pub fn new(op: &'static str, workspace: &Workspace<'_>) -> Self {
        Parts {
            op,
            first: None,
            list: ArrayVec::new(),
            more: None,
            last: None,
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
        self.be_exact();
        self
    }

    /// As [`Parts::exactly`].
    pub fn be_exact(&mut self) {
        self.exact = true;
    }

    /// Has as many parts as there are, those behind the first `N` in memory of the host's: where ranks give
    /// each other something in turn, their number says how many.
    pub fn of_any_number(mut self) -> Self {
        self.more = Some(Vec::new());
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
    pub fn absorb<const M: usize>(&mut self, whole: Result<Parts<'t, M>>) -> Result<()> {
        let whole = named(self.op, whole, &[])?;
        if whole.idle {
            return Ok(());
        }
        let mut whole = whole;
        self.most_taken = self.most_taken.max(self.taken + whole.most_taken);
        if let Some(first) = whole.first {
            self.add_collective(first)?;
        }
        whole.list.drain(..).try_for_each(|part| self.add(part))?;
        let more = whole.more.into_iter().flatten();
        more.into_iter().try_for_each(|part| self.add(part))?;
        match whole.last {
            Some(last) => self.add_collective(last),
            None => Ok(()),
        }
    }

    fn add(&mut self, part: Part<AnyProblem<'t>>) -> Result<()> {
        self.close()?;
        self.add_to_list(part)
    }

    fn add_to_list(&mut self, part: Part<AnyProblem<'t>>) -> Result<()> {
        let Err(full) = self.list.try_push(part) else {
            return Ok(());
        };
        let op = self.op;
        match &mut self.more {
            Some(more) => push(op, more, full.element()),
            None => Err(Error::Internal {
                op,
                message: text!("has more than {N} parts"),
            }),
        }
    }

    /// Adds a collective, to the list if it is neither the first part nor the last.
    fn add_collective(&mut self, part: Part<Collective<'t>>) -> Result<()> {
        self.close()?;
        let place = match self.first.is_none() && self.list.is_empty() {
            true => &mut self.first,
            false => &mut self.last,
        };
        *place = Some(part);
        Ok(())
    }

    /// What was last is so no more.
    fn close(&mut self) -> Result<()> {
        let Some(Part { is, names }) = self.last.take() else {
            return Ok(());
        };
        let is = AnyProblem::Collective(is);
        self.add_to_list(Part { is, names })
    }

    /// Adds what ranks do together, which was validated.
    pub fn push_collective(&mut self, is: Collective<'t>, names: Names) -> Result<()> {
        self.add_collective(Part { is, names })
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

/// The plan of what ranks do together.
type CollectivePart<'t, 'a> = Part<<Collective<'t> as Planned>::Plan<'a>>;

/// One plan for each part.
pub(crate) struct PartsPlan<'t, 'a, const N: usize> {
    op: &'static str,
    first: Option<CollectivePart<'t, 'a>>,
    list: ArrayVec<Part<AnyPlan<'t, 'a>>, N>,
    more: Vec<Part<AnyPlan<'t, 'a>>>,
    last: Option<CollectivePart<'t, 'a>>,
    /// Bytes of what passes between parts, of what they share at least, and of what they have use
    /// for.
    between: usize,
    shared: usize,
    useful: usize,
    exact: bool,
    idle: bool,
}

impl<'t, const N: usize> Planned for Parts<'t, N> {
    type Plan<'a> = PartsPlan<'t, 'a, N>;

    fn plan(mut self, ctx: &Context) -> Result<PartsPlan<'t, '_, N>> {
        let op = self.op;
        // These use no workspace.
        let collective = |part: Option<Part<Collective<'t>>>| {
            let planned = part.map(|Part { is, names }| {
                let is = named(op, is.plan(ctx), names)?;
                Ok::<_, Error>(Part { is, names })
            });
            planned.transpose()
        };
        let (first, last) = (collective(self.first)?, collective(self.last)?);
        let (mut list, mut more) = (ArrayVec::new(), Vec::new());
        let (mut shared, mut useful) = (0, 0);
        let rest = self.more.take().unwrap_or_default();
        for Part { is, names } in self.list.drain(..).chain(rest) {
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
            if let Err(full) = list.try_push(Part { is: plan, names }) {
                push(op, &mut more, full.element())?;
            }
        }
        Ok(PartsPlan {
            op,
            first,
            list,
            more,
            last,
            between: self.most_taken,
            shared: if self.exact { useful } else { shared },
            useful,
            exact: self.exact,
            idle: self.idle,
        })
    }
}

impl<const N: usize> Plan for PartsPlan<'_, '_, N> {
    /// The most particular one of the parts'.
    fn implementation(&self) -> Implementation {
        let all = self.each().map(|(plan, _)| plan.implementation());
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
        for (plan, names) in self.each() {
            let used = named(self.op, self.size_of(plan, left), names)?;
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
        for (plan, names) in self.each().filter(|_| self.exact) {
            named(self.op, plan.probe(), names)?;
        }
        for (plan, names) in self.each() {
            let launched = self.launch_one(plan, shared, stream);
            named(self.op, launched, names)?;
        }
        Ok(())
    }
}

impl<const N: usize> PartsPlan<'_, '_, N> {
    /// All parts, in the order in which they run.
    fn each(&self) -> impl Iterator<Item = (&dyn Plan, Names)> {
        let list = self.list.iter().chain(&self.more);
        let list = list.map(|part| (part.is.as_plan(), part.names));
        let [first, last] = [&self.first, &self.last].map(|part| part.iter().map(of_collective));
        first.chain(list).chain(last)
    }

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

/// A collective as any part.
fn of_collective<'p>(part: &'p CollectivePart<'_, '_>) -> (&'p dyn Plan, Names) {
    (&part.is, part.names)
}

/// An operation of one problem where it is not made of parts.
#[allow(clippy::large_enum_variant)] // as of parts
pub(crate) enum OneOr<'t, P, const N: usize> {
    One(P),
    Parts(Parts<'t, N>),
}

/// The plan of either.
#[allow(clippy::large_enum_variant)] // as of parts
pub(crate) enum OneOrPlan<'t, 'a, P, const N: usize> {
    One(P),
    Parts(PartsPlan<'t, 'a, N>),
}

impl<'t, P: Planned, const N: usize> Planned for OneOr<'t, P, N>
where
    for<'a> P::Plan<'a>: 'a,
{
    type Plan<'a> = OneOrPlan<'t, 'a, P::Plan<'a>, N>;

    fn plan(self, ctx: &Context) -> Result<Self::Plan<'_>> {
        Ok(match self {
            OneOr::One(problem) => OneOrPlan::One(problem.plan(ctx)?),
            OneOr::Parts(parts) => OneOrPlan::Parts(parts.plan(ctx)?),
        })
    }
}

impl<P: Plan, const N: usize> OneOrPlan<'_, '_, P, N> {
    fn as_plan(&self) -> &dyn Plan {
        match self {
            OneOrPlan::One(plan) => plan,
            OneOrPlan::Parts(plan) => plan,
        }
    }
}

impl<P: Plan, const N: usize> Plan for OneOrPlan<'_, '_, P, N> {
    fn implementation(&self) -> Implementation {
        self.as_plan().implementation()
    }

    fn needed(&self) -> usize {
        self.as_plan().needed()
    }

    fn useful(&self) -> Result<usize> {
        self.as_plan().useful()
    }

    fn useful_for_any(&self) -> Result<usize> {
        self.as_plan().useful_for_any()
    }

    fn used(&self, given: usize) -> Result<usize> {
        self.as_plan().used(given)
    }

    fn without_allocating(&self) -> usize {
        self.as_plan().without_allocating()
    }

    fn probe(&self) -> Result<()> {
        self.as_plan().probe()
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        self.as_plan().launch(scratch, stream)
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
