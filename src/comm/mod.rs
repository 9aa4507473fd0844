//! Groups of ranks, and a rank's part in one: what collectives run over.
//!
//! A group is local, of threads of one process and on the CPU backend, or NCCL's, of GPUs. Local groups
//! are for tests of what will run on many GPUs, and for a few ranks on a large host; they need no
//! library. Every rank makes its [`Comm`] with one [`Id`], from a context of its own or, in a local
//! group, one that ranks share; or it borrows the `ncclComm_t` that an engine has.
//!
//! What runs over a group is in [`ops`](crate::ops): [`all_reduce`](crate::ops::all_reduce),
//! [`all_gather`](crate::ops::all_gather), [`reduce_scatter`](crate::ops::reduce_scatter),
//! [`broadcast`](crate::ops::broadcast), [`all_to_all`](crate::ops::all_to_all) and
//! [`send_receive`](crate::ops::send_receive). All ranks of a group call the same ones in the same
//! order.
//!
//! ```
//! use std::thread;
//! use unsloth::comm::{Comm, Id, Kind, Params};
//! use unsloth::ops::all_reduce::{self, ReduceOp};
//! use unsloth::{Context, InOut, Stream, TensorMut};
//!
//! let ctx = Context::cpu()?;
//! let id = Id::new(Kind::Local)?;
//! let run = &|rank: usize| {
//!     let comm = Comm::new(&ctx, &Params::local(id, rank, 2))?;
//!     let mut x = [rank as f32 + 1.0; 3];
//!     let params = all_reduce::Params {
//!         comm: &comm,
//!         x: InOut::InPlace(TensorMut::from_slice(&mut x, &[3])?),
//!         op: ReduceOp::Sum,
//!     };
//!     all_reduce::forward(&ctx, &params, Stream::DEFAULT)?;
//!     Ok::<_, unsloth::Error>(x)
//! };
//! thread::scope(|scope| {
//!     let ranks = [0, 1].map(|rank| scope.spawn(move || run(rank)));
//!     for rank in ranks {
//!         assert_eq!(rank.join().unwrap()?, [3.0; 3]);
//!     }
//!     Ok::<(), unsloth::Error>(())
//! })?;
//! # Ok::<(), unsloth::Error>(())
//! ```

mod memory;
pub mod shard;
pub mod tokens;

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::time::Duration;

use crate::backend::Stream;
pub use crate::backend::{NcclLibrary, SymbolCallback, Symbols};
use crate::context::{Context, ID_BYTES, MAX_RANKS, Transport};
use crate::error::{Error, Result, text};

/// How ranks of a group reach each other. The discriminants are those of the C ABI
/// (`UNSLOTH_COMM_KIND_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Kind {
    /// They are threads of one process, on the CPU backend.
    #[default]
    Local = 0,
    /// By NCCL, on the CUDA backend.
    Nccl = 1,
}

impl Kind {
    /// The kind with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Kind> {
        [Kind::Local, Kind::Nccl]
            .into_iter()
            .find(|k| *k as u32 == value)
    }
}

/// What the ranks of a group find each other by. One makes it and gives it to the others, and it serves
/// one group.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Id(pub(crate) [u8; ID_BYTES]);

impl Id {
    /// Makes one, of NCCL's with the library that there is.
    ///
    /// # Errors
    /// As [`Id::of`].
    pub fn new(kind: Kind) -> Result<Id> {
        Id::of(kind, &NcclLibrary::default())
    }

    /// Makes one, of NCCL's with this library.
    ///
    /// # Errors
    /// The host has too little memory; there is no NCCL, or it fails.
    pub fn of(kind: Kind, library: &NcclLibrary<'_>) -> Result<Id> {
        const OP: &str = "comm_id_create";
        Ok(Id(match kind {
            Kind::Local => Transport::local_id(OP)?,
            Kind::Nccl => Transport::nccl_id(OP, library)?,
        }))
    }

    /// An id as its bytes, which another rank was given.
    pub fn from_bytes(bytes: [u8; ID_BYTES]) -> Id {
        Id(bytes)
    }

    /// Its bytes, to be given to other ranks.
    pub fn as_bytes(&self) -> &[u8; ID_BYTES] {
        &self.0
    }
}

impl std::fmt::Debug for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Id(..)")
    }
}

/// How to make a [`Comm`].
#[derive(Clone, Debug)]
pub struct Params<'a> {
    /// How ranks reach each other: local ones on the CPU backend, by NCCL on CUDA.
    pub kind: Kind,
    /// Of the group.
    pub id: Id,
    /// Which rank this is, below `size`.
    pub rank: usize,
    /// Ranks of the group; of a local one 1 to 1024.
    pub size: usize,
    /// How long a rank of a local group waits for another, when they meet and in each collective;
    /// `None` for [`Params::TIMEOUT`].
    pub timeout: Option<Duration>,
    /// Where NCCL is, for groups of its.
    pub library: NcclLibrary<'a>,
}

impl Params<'_> {
    /// How long ranks wait for each other unless told: 10 minutes.
    pub const TIMEOUT: Duration = Duration::from_secs(600);

    /// A rank of a local group.
    pub fn local(id: Id, rank: usize, size: usize) -> Self {
        Params {
            kind: Kind::Local,
            id,
            rank,
            size,
            timeout: None,
            library: NcclLibrary::default(),
        }
    }

    /// A rank of a group of NCCL's.
    pub fn nccl(id: Id, rank: usize, size: usize) -> Self {
        Params {
            kind: Kind::Nccl,
            ..Params::local(id, rank, size)
        }
    }
}

/// A rank's part in a group. Several threads may use it at a time; their collectives take turns. Sums beside
/// products ([`Parallel::chunk_rows`](crate::ops::parallel::Parallel::chunk_rows)) share a stream of NCCL's groups:
/// while a call that has some is captured, no other thread makes one with the same group.
///
/// It keeps its context alive. On a GPU, dropping it waits for the device; one whose peers are dead is
/// aborted first. Once a rank of a local group is dropped the others come back from what
/// they wait for it in, and begin nothing of all ranks any more.
#[derive(Debug)]
pub struct Comm {
    context: Context,
    transport: Transport,
    kind: Kind,
    rank: usize,
    size: usize,
    memory: Mutex<Vec<memory::Memory>>,
}

impl Comm {
    /// Joins a group. Every rank calls it, and it waits for all.
    ///
    /// # Errors
    /// A rank is taken, sizes differ, an id has served or is of another process; the context is not of
    /// the kind's backend; [`Error::Comm`] where the others failed or did not come in time.
    pub fn new(context: &Context, params: &Params<'_>) -> Result<Comm> {
        const OP: &str = "comm_create";
        let Params { rank, size, .. } = *params;
        let most = match params.kind {
            Kind::Local => MAX_RANKS,
            Kind::Nccl => i32::MAX as usize,
        };
        if size == 0 || size > most {
            let problem = text!("is {size}, allowed: 1 to {most}");
            return Err(Error::invalid(OP, "size", problem));
        }
        if rank >= size {
            let problem = text!("is {rank}, allowed: 0 to {}", size - 1);
            return Err(Error::invalid(OP, "rank", problem));
        }
        let transport = match params.kind {
            Kind::Local => {
                let timeout = params.timeout.unwrap_or(Params::TIMEOUT);
                Transport::local(OP, context, &params.id.0, (rank, size), timeout)?
            }
            Kind::Nccl => {
                let library = &params.library;
                Transport::nccl(OP, context, library, &params.id.0, (rank, size))?
            }
        };
        Ok(Comm::over(context, transport, params.kind, (rank, size)))
    }

    /// A rank's part in a group that an engine has: its rank and size are asked of NCCL. It is borrowed,
    /// and ended by who made it, after the result.
    ///
    /// # Errors
    /// The context is of another backend or of another device than `comm`; there is no such library, or
    /// it fails.
    ///
    /// # Safety
    /// `comm` is a live `ncclComm_t` of the library's for as long as the result lives, and nobody else
    /// calls NCCL with it while a call with the result runs.
    pub unsafe fn from_nccl(
        context: &Context,
        comm: NonNull<c_void>,
        library: &NcclLibrary<'_>,
    ) -> Result<Comm> {
        const OP: &str = "comm_create";
        // SAFETY: the caller's promise.
        let transport = unsafe { Transport::lent(OP, context, library, comm.as_ptr()) }?;
        let ranks = transport
            .of_nccl()
            .map_or((0, 1), |(rank, size, _)| (rank, size));
        Ok(Comm::over(context, transport, Kind::Nccl, ranks))
    }

    fn over(
        context: &Context,
        transport: Transport,
        kind: Kind,
        (rank, size): (usize, usize),
    ) -> Comm {
        tracing::debug!("comm_create: rank {rank} of {size}, {kind:?}");
        Comm {
            context: context.clone(),
            transport,
            kind,
            rank,
            size,
            memory: Mutex::default(),
        }
    }

    /// The version of NCCL as its `ncclGetVersion` gives it, such as 22803; 0 of a local group.
    pub fn library_version(&self) -> i32 {
        self.transport
            .of_nccl()
            .map_or(0, |(_, _, version)| version)
    }

    /// How ranks reach each other.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Which rank this is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The context that it was made with, which its collectives are called with.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Meets the other ranks once, so that what a first collective takes longer for is done: NCCL connects
    /// ranks and allocates then. Every rank calls it; it waits for the stream, which is not captured.
    ///
    /// A group of up to eight ranks whose GPUs reach each other's memory gets slots here, if NCCL is 2.29 or later: each rank
    /// allocates 512 KiB for every rank of the group, to which the others write. Where there are slots
    /// [`all_reduce_rms_norm`](crate::ops::all_reduce_rms_norm) of few rows is one launch. They count as the context's memory. If one
    /// rank has no room for its slots, no rank has any.
    ///
    /// # Errors
    /// As a collective; too little memory.
    pub fn warm_up(&self, stream: Stream) -> Result<()> {
        const OP: &str = "comm_warm_up";
        self.context.device().check_stream(OP, stream)?;
        let advice = "warm up before";
        self.context.check_not_capturing(OP, stream, advice)?;
        self.transport.warm_up(OP, &self.context, stream)?;
        self.make_slots(OP, stream)
    }

    /// Whether the group works, as far as this rank knows. Does not wait.
    ///
    /// # Errors
    /// [`Error::Comm`], with the reason why it does not.
    pub fn health(&self) -> Result<()> {
        self.transport.health("comm_error_get")
    }

    /// Breaks the group: ranks that wait for others come back with an error, and later calls are
    /// refused. Any thread may call it, while others are in collectives. On a GPU every rank calls it. A communicator
    /// that was borrowed is not aborted by this, but this library's kernels no longer wait for its other ranks: who made it aborts it too.
    ///
    /// # Errors
    /// NCCL is older than 2.4.
    pub fn abort(&self) -> Result<()> {
        self.transport.abort("comm_abort")
    }

    pub(crate) fn transport(&self) -> &Transport {
        &self.transport
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.release();
    }
}
