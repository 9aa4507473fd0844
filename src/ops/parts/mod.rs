//! Operations made of others: the problems of their parts, which run one after the other over one
//! workspace.
//!
//! What passes between parts lies at the beginning of the workspace. Behind it is room that the
//! parts share, as one has run before the next begins. What ranks do together may run beside the parts
//! behind it; it uses none of that room.

mod any;
mod one_or;
mod plan;

use arrayvec::ArrayVec;

use crate::alloc::push;
use crate::context::{Beside, Both, Collective, Join};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::tensor::{RawTensor, Workspace};
use any::{Any, AnyProblem, IsPart};
pub(crate) use one_or::OneOr;

/// What a part and the whole call the same argument, in this order.
pub(crate) type Names = &'static [(&'static str, &'static str)];

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
        self.let_be_any_number();
        self
    }

    /// As [`Parts::of_any_number`].
    pub fn let_be_any_number(&mut self) {
        self.more.get_or_insert_default();
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
        if whole.more.is_some() {
            self.let_be_any_number();
        }
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

    /// Adds two collectives that are one launch where that can be.
    pub fn push_both(&mut self, is: Both<'t>, names: Names) -> Result<()> {
        let is = AnyProblem::Both(is);
        self.add(Part { is, names })
    }

    /// Adds what ranks do together beside the parts behind it, up to a join of this number. There are as many
    /// parts as there are chunks of such work.
    pub fn push_beside(&mut self, number: usize, is: Collective<'t>, names: Names) -> Result<()> {
        self.let_be_any_number();
        let is = AnyProblem::Beside(Beside { is, number });
        self.add(Part { is, names })
    }

    /// Adds that what is behind it waits for the work of this number that runs beside.
    pub fn push_join(&mut self, is: Join<'t>) -> Result<()> {
        let is = AnyProblem::Join(is);
        self.add(Part { is, names: &[] })
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
