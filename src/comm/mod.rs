//! Groups of ranks, and a rank's part in one: what collectives run over.
//!
//! A group is local, of threads of one process and on the CPU backend, or NCCL's, of GPUs. Local groups
//! are for tests of what will run on many GPUs, and for a few ranks on a large host; they need no
//! library. Every rank makes its [`Comm`] with one [`Id`], from a context of its own or, in a local
//! group, one that ranks share.
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
//! thread::scope(|scope| {
//!     for rank in 0..2 {
//!         let ctx = &ctx;
//!         scope.spawn(move || {
//!             let comm = Comm::new(ctx, &Params::local(id, rank, 2))?;
//!             let mut x = [rank as f32 + 1.0; 3];
//!             let params = all_reduce::Params {
//!                 comm: &comm,
//!                 x: InOut::InPlace(TensorMut::from_slice(&mut x, &[3])?),
//!                 op: ReduceOp::Sum,
//!             };
//!             all_reduce::forward(ctx, &params, Stream::DEFAULT)?;
//!             assert_eq!(x, [3.0; 3]);
//!             unsloth::Result::Ok(())
//!         });
//!     }
//! });
//! # Ok::<(), unsloth::Error>(())
//! ```

use std::time::Duration;

use crate::backend::Stream;
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
}

impl Kind {
    /// The kind with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Kind> {
        [Kind::Local].into_iter().find(|k| *k as u32 == value)
    }
}

/// What the ranks of a group find each other by. One makes it and gives it to the others, and it serves
/// one group.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Id(pub(crate) [u8; ID_BYTES]);

impl Id {
    /// Makes one.
    ///
    /// # Errors
    /// The host has too little memory.
    pub fn new(kind: Kind) -> Result<Id> {
        const OP: &str = "comm_id_create";
        match kind {
            Kind::Local => Ok(Id(Transport::local_id(OP)?)),
        }
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
pub struct Params {
    /// How ranks reach each other: local ones on the CPU backend.
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
}

impl Params {
    /// How long ranks wait for each other unless told: 10 minutes.
    pub const TIMEOUT: Duration = Duration::from_secs(600);

    /// A rank of a local group.
    pub fn local(id: Id, rank: usize, size: usize) -> Params {
        Params {
            kind: Kind::Local,
            id,
            rank,
            size,
            timeout: None,
        }
    }
}

/// A rank's part in a group. Several threads may use it at a time; their collectives take turns.
///
/// It keeps its context alive. Once a rank of a local group is dropped the others come back from what
/// they wait for it in, and begin nothing of all ranks any more.
#[derive(Debug)]
pub struct Comm {
    context: Context,
    transport: Transport,
    kind: Kind,
    rank: usize,
    size: usize,
}

impl Comm {
    /// Joins a group. Every rank calls it, and it waits for all.
    ///
    /// # Errors
    /// A rank is taken, sizes differ, an id has served or is of another process; the context is not of
    /// the kind's backend; [`Error::Comm`] where the others failed or did not come in time.
    pub fn new(context: &Context, params: &Params) -> Result<Comm> {
        const OP: &str = "comm_create";
        let Params { rank, size, .. } = *params;
        if size == 0 || size > MAX_RANKS {
            let problem = text!("is {size}, allowed: 1 to {MAX_RANKS}");
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
        };
        tracing::debug!("{OP}: rank {rank} of {size}, {:?}", params.kind);
        Ok(Comm {
            context: context.clone(),
            transport,
            kind: params.kind,
            rank,
            size,
        })
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

    /// Meets the other ranks once, so that what a first collective takes longer for is done. Every rank
    /// calls it.
    ///
    /// # Errors
    /// As a collective.
    pub fn warm_up(&self, stream: Stream) -> Result<()> {
        const OP: &str = "comm_warm_up";
        self.context.device().check_stream(OP, stream)?;
        self.transport.warm_up(OP, stream)
    }

    /// Whether the group works, as far as this rank knows. Does not wait.
    ///
    /// # Errors
    /// [`Error::Comm`], with the reason why it does not.
    pub fn health(&self) -> Result<()> {
        self.transport.health("comm_error_get")
    }

    /// Breaks the group: ranks that wait for others come back with an error, and later calls are
    /// refused. Any thread may call it, while others are in collectives.
    ///
    /// # Errors
    /// The library refuses.
    pub fn abort(&self) -> Result<()> {
        self.transport.abort("comm_abort")
    }

    pub(crate) fn transport(&self) -> &Transport {
        &self.transport
    }
}
