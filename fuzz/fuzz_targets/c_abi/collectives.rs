//! Collectives, of a group of one rank: a fuzzer has one thread. And groups that are not made.

use std::sync::OnceLock;

use unsloth::ffi::all_gather::*;
use unsloth::ffi::all_reduce::*;
use unsloth::ffi::all_reduce_rms_norm::*;
use unsloth::ffi::all_to_all::*;
use unsloth::ffi::broadcast::*;
use unsloth::ffi::comm::*;
use unsloth::ffi::context_parallel_tokens::*;
use unsloth::ffi::parallel::*;
use unsloth::ffi::reduce_scatter::*;
use unsloth::ffi::send_receive::*;
use unsloth::ffi::shard::*;
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::*;

use crate::call::{Call, Stated, like, zeroed};
use crate::input::Input;
use crate::{chosen, context, last_message};

/// The group of the context that is chosen, which all executions share.
fn group() -> *mut unsloth_comm {
    static GROUPS: [OnceLock<usize>; 2] = [const { OnceLock::new() }; 2];
    let ticket = GROUPS[chosen()].get_or_init(|| {
        // SAFETY: params structs, and pointers to live locals.
        unsafe {
            let mut params = sound();
            params.size = 1;
            let mut comm = std::ptr::null_mut();
            let status = unsloth_comm_create(context(), &params, &mut comm);
            assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
            comm.expose_provenance()
        }
    });
    std::ptr::with_exposed_provenance_mut(*ticket)
}

/// The group, seldom none.
pub fn comm(input: &mut Input) -> *mut unsloth_comm {
    match input.one_in(32) {
        true => std::ptr::without_provenance_mut(input.word() as usize),
        false => group(),
    }
}

/// Arguments of a group with a new id, and of no rank yet.
unsafe fn sound() -> unsloth_comm_params {
    // SAFETY: params structs; pointers to live locals.
    unsafe {
        let mut params = zeroed::<unsloth_comm_params>().params;
        params.struct_size = size_of::<unsloth_comm_params>() as u32;
        let mut of_id = zeroed::<unsloth_comm_id_params>().params;
        of_id.struct_size = size_of::<unsloth_comm_id_params>() as u32;
        let status = unsloth_comm_id_create(&of_id, &mut params.id);
        assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
        params
    }
}

/// A rank's part of a matrix lies in it, or there is none.
fn shard(input: &mut Input) {
    // SAFETY: params structs of the size that they state; pointers to live locals.
    unsafe {
        let mut params = zeroed::<unsloth_shard_params>().params;
        params.struct_size = size_of::<unsloth_shard_params>() as u32;
        params.kind = u32::from(input.byte()) % 10;
        params.dtype = u32::from(input.byte()) % 24;
        params.size = input.pick(&[1, 2, 3, 4, 8, 0, -1, i32::MAX]);
        params.rank = input.pick(&[0, 0, 1, 2, 7, -1, i32::MAX]);
        let mut number = || match input.one_in(12) {
            true => input.number(),
            false => input.up_to(40),
        };
        (params.num_heads, params.num_kv_heads) = (number(), number());
        (params.head_dim, params.v_head_dim) = (number(), number());
        (params.rows, params.columns, params.unit) = (number(), number(), number());
        if input.one_in(2) {
            // As attention's matrices have them.
            let rows = params.num_heads.wrapping_mul(params.head_dim);
            (params.rows, params.columns) = (rows, rows);
        }
        let mut shard = zeroed::<unsloth_shard>().params;
        shard.struct_size = size_of::<unsloth_shard>() as u32;
        let status = unsloth_shard_get(&params, &mut shard);
        assert_ne!(status, UNSLOTH_STATUS_INTERNAL_ERROR, "{}", last_message());
        if status != UNSLOTH_STATUS_SUCCESS {
            return assert_eq!(shard.num_pieces, 0);
        }
        for piece in &shard.pieces[..shard.num_pieces as usize] {
            let (row, column) = (piece.row + piece.rows, piece.column + piece.columns);
            assert!(piece.row >= 0 && piece.column >= 0 && piece.to_row >= 0);
            assert!(row <= params.rows && column <= params.columns);
            assert!(piece.to_row + piece.rows <= shard.rows && piece.columns == shard.columns);
        }
    }
}

/// Tokens of a rank are of their batch, or padding.
fn tokens(input: &mut Input) {
    const ROOM: usize = 64;
    // SAFETY: a params struct of the size that it states; pointers to live locals with as many entries as are stated.
    unsafe {
        let lengths = [0; 4].map(|_| input.up_to(20));
        let mut params = zeroed::<unsloth_context_parallel_tokens_params>().params;
        params.struct_size = size_of::<unsloth_context_parallel_tokens_params>() as u32;
        params.order = u32::from(input.byte()) % 3;
        params.size = input.pick(&[1, 2, 3, 4, 8, 0, -1, i32::MAX]);
        params.rank = input.pick(&[0, 0, 1, 2, 7, -1, i32::MAX]);
        params.length = match input.one_in(12) {
            true => input.number(),
            false => input.up_to(20),
        };
        params.batch = input.up_to(4);
        match input.one_in(2) {
            true => params.lengths = lengths.as_ptr(),
            false if input.one_in(12) => params.batch = input.number(),
            false => {}
        }
        let (mut tokens, mut positions, mut ids) = (-7, [-7; ROOM], [-7; ROOM]);
        let status = unsloth_context_parallel_tokens_get(
            &params,
            &mut tokens,
            positions.as_mut_ptr(),
            ids.as_mut_ptr(),
            ROOM,
        );
        assert_ne!(status, UNSLOTH_STATUS_INTERNAL_ERROR, "{}", last_message());
        if status != UNSLOTH_STATUS_SUCCESS {
            return assert_eq!((tokens, positions[0], ids[0]), (-7, -7, -7));
        }
        let all = (tokens * params.batch) as usize;
        assert!(ids[all..].iter().all(|id| *id == -7));
        for (position, id) in positions[..all].iter().zip(&ids[..all]) {
            assert!(*id == -1 || id % params.length == i64::from(*position));
            assert!(*id < params.batch * params.length);
        }
    }
}

/// Packed sequences of a rank are runs of its tokens.
fn packed(input: &mut Input) {
    const TOKENS: usize = 16;
    // SAFETY: a params struct of the size that it states; pointers to live locals with as many entries as are stated.
    unsafe {
        let mut starts = [0i32; 5];
        for i in 1..starts.len() {
            starts[i] = starts[i - 1] + input.up_to(9) as i32 - i32::from(input.one_in(40));
        }
        let mut params = zeroed::<unsloth_context_parallel_packed_params>().params;
        params.struct_size = size_of::<unsloth_context_parallel_packed_params>() as u32;
        params.causal = u32::from(input.byte()) % 3;
        params.size = input.pick(&[1, 2, 3, 4, 8, 0, -1, i32::MAX]);
        params.rank = input.pick(&[0, 0, 1, 2, 7, -1, i32::MAX]);
        params.tokens = input.up_to(TOKENS as i64);
        params.batch = input.up_to(4);
        params.cu_seqlens = starts.as_ptr();
        let (mut of_queries, mut of_keys) = ([-7; 5], [-7; 5]);
        let mut positions = [-7; TOKENS];
        let status = unsloth_context_parallel_packed_get(
            &params,
            of_queries.as_mut_ptr(),
            of_keys.as_mut_ptr(),
            positions.as_mut_ptr(),
        );
        assert_ne!(status, UNSLOTH_STATUS_INTERNAL_ERROR, "{}", last_message());
        if status != UNSLOTH_STATUS_SUCCESS {
            return assert_eq!((of_queries[0], of_keys[0], positions[0]), (-7, -7, -7));
        }
        let (batch, tokens) = (params.batch as usize, params.tokens as usize);
        assert!(of_queries[..=batch].is_sorted() && of_keys[..=batch].is_sorted());
        assert!(of_queries[0] >= 0 && of_queries[batch] <= params.tokens as i32);
        assert!(positions[..tokens].iter().all(|position| *position >= 0));
        assert!(positions[tokens..].iter().all(|position| *position == -7));
    }
}

/// Groups are made or refused, in time.
pub fn run(input: &mut Input) {
    match input.byte() % 6 {
        0 => return shard(input),
        1 => return tokens(input),
        2 => return packed(input),
        _ => {}
    }
    // SAFETY: params structs of the size that they state; pointers to live locals, and the handle that
    // was made.
    unsafe {
        let mut params = sound();
        params.size = input.pick(&[1, 1, 2, 0, -1, i32::MAX, 1025]);
        params.rank = input.pick(&[0, 0, 1, -1, i32::MIN, 1024]);
        params.timeout_ms = 1;
        if input.one_in(8) {
            params.kind = input.pick(&[1, 2, u32::MAX]);
        }
        if input.one_in(4) {
            let at = usize::from(input.byte()) % params.id.bytes.len();
            params.id.bytes[at] ^= input.byte();
        }
        let mut comm = std::ptr::null_mut();
        let status = unsloth_comm_create(context(), &params, &mut comm);
        assert_ne!(status, UNSLOTH_STATUS_INTERNAL_ERROR, "{}", last_message());
        assert_eq!(status == UNSLOTH_STATUS_SUCCESS, !comm.is_null());
        if !comm.is_null() {
            assert_eq!(params.size, 1);
            if input.one_in(2) {
                assert_eq!(unsloth_comm_abort(comm), UNSLOTH_STATUS_SUCCESS);
            }
            assert_eq!(unsloth_comm_destroy(comm), UNSLOTH_STATUS_SUCCESS);
        }
    }
}

impl Call<'_, '_> {
    /// The group, seldom none.
    pub fn comm(&mut self) -> *mut unsloth_comm {
        comm(self.input)
    }

    /// Seldom the group, for a layer that it divides the rows `of` among: with one rank parts are the whole.
    pub fn parallel(&mut self, of: &unsloth_tensor) -> unsloth_parallel {
        // SAFETY: a struct of integers and pointers.
        let mut parallel: unsloth_parallel = unsafe { std::mem::zeroed() };
        if self.input.one_in(4) {
            parallel.comm = self.comm();
            parallel.sequence = self.flag(1);
            parallel.partition = self.flag(1);
            parallel.chunk_rows = self.input.pick(&[0, 0, 1, 2, 3, -1, i64::MAX]);
            if parallel.sequence == 1 {
                parallel.row_counts = self.counts(of);
            }
        }
        parallel
    }

    /// The same of a vocabulary, whose partition is always of rows.
    pub fn parallel_of_rows(&mut self, of: &unsloth_tensor) -> unsloth_parallel {
        let mut parallel = self.parallel(of);
        parallel.partition = u32::from(self.input.one_in(32));
        parallel.chunk_rows = i64::from(self.input.one_in(32));
        parallel
    }

    /// The row of a vocabulary that `rows` begin with, and its rows.
    pub fn vocabulary(&mut self, parallel: &unsloth_parallel, rows: i64) -> (i64, i64) {
        if parallel.comm.is_null() {
            return (0, i64::from(self.input.one_in(32)));
        }
        let begin = self.input.pick(&[0, 0, 3, -1, i64::MAX]);
        let behind = self.input.pick(&[0, 0, 5, -1, i64::MAX]);
        (begin, begin.saturating_add(rows).saturating_add(behind))
    }

    fn moved_dtype(&mut self) -> unsloth_dtype {
        self.input.pick(&[
            UNSLOTH_DTYPE_F32,
            UNSLOTH_DTYPE_F16,
            UNSLOTH_DTYPE_BF16,
            UNSLOTH_DTYPE_I32,
            UNSLOTH_DTYPE_I64,
            UNSLOTH_DTYPE_I8,
            UNSLOTH_DTYPE_BOOL,
            UNSLOTH_DTYPE_Q4_0,
        ])
    }

    /// A tensor, and one of the same shape.
    fn moved(&mut self) -> (unsloth_tensor, unsloth_tensor) {
        let dtype = self.moved_dtype();
        let (mut shape, dim) = self.rows();
        shape.push(dim);
        let x = self.tensor(dtype, &shape);
        let out = match self.input.one_in(4) {
            true => x,
            false => self.tensor(dtype, &like(&x)),
        };
        (x, out)
    }

    /// The one count that there is, seldom a wrong one; or none.
    fn counts(&mut self, of: &unsloth_tensor) -> *const i64 {
        if self.input.one_in(2) {
            return std::ptr::null();
        }
        let count = match self.input.one_in(4) {
            true => self.input.number(),
            false => of.shape[0],
        };
        let counts = Box::new([count]);
        let at = counts.as_ptr();
        self.kept.push(counts);
        at
    }

    pub fn all_reduce(&mut self) -> Box<Stated<unsloth_all_reduce_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_all_reduce_params>> = unsafe { zeroed() };
        let p = &mut stated.params;
        p.comm = self.comm();
        p.op = self.input.up_to(5) as u32;
        (p.x, p.out) = self.moved();
        stated
    }

    pub fn all_reduce_rms_norm(&mut self) -> Box<Stated<unsloth_all_reduce_rms_norm_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_all_reduce_rms_norm_params>> = unsafe { zeroed() };
        // As without ranks.
        let norm = self.rms_norm().params;
        let p = &mut stated.params;
        p.comm = self.comm();
        (p.x, p.out, p.weight) = (norm.x, norm.out, norm.weight);
        (p.residual, p.residual_out) = (norm.residual, norm.residual_out);
        (p.epsilon, p.weight_offset) = (norm.epsilon, norm.weight_offset);
        // One rank has all rows.
        p.sequence = self.flag(1);
        stated
    }

    pub fn all_gather(&mut self) -> Box<Stated<unsloth_all_gather_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_all_gather_params>> = unsafe { zeroed() };
        let p = &mut stated.params;
        p.comm = self.comm();
        (p.x, p.out) = self.moved();
        p.counts = self.counts(&p.out);
        p.reserved = self.flag(0);
        stated
    }

    pub fn reduce_scatter(&mut self) -> Box<Stated<unsloth_reduce_scatter_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_reduce_scatter_params>> = unsafe { zeroed() };
        let p = &mut stated.params;
        p.comm = self.comm();
        p.op = self.input.up_to(5) as u32;
        (p.x, p.out) = self.moved();
        p.counts = self.counts(&p.x);
        stated
    }

    pub fn broadcast(&mut self) -> Box<Stated<unsloth_broadcast_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_broadcast_params>> = unsafe { zeroed() };
        let p = &mut stated.params;
        p.comm = self.comm();
        p.root = self.input.pick(&[0, 0, 0, 1, -1, i32::MAX]);
        (p.x, p.out) = self.moved();
        stated
    }

    pub fn all_to_all(&mut self) -> Box<Stated<unsloth_all_to_all_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_all_to_all_params>> = unsafe { zeroed() };
        let p = &mut stated.params;
        p.comm = self.comm();
        (p.x, p.out) = self.moved();
        p.send_counts = self.counts(&p.x);
        p.receive_counts = self.counts(&p.out);
        p.reserved = self.flag(0);
        stated
    }

    pub fn send_receive(&mut self) -> Box<Stated<unsloth_send_receive_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_send_receive_params>> = unsafe { zeroed() };
        let p = &mut stated.params;
        p.comm = self.comm();
        p.to = self.input.pick(&[0, 0, 0, 1, -1, i32::MAX]);
        p.from = self.input.pick(&[0, 0, 0, 1, -1, i32::MIN]);
        (p.x, p.out) = self.moved();
        p.reserved = self.flag(0);
        stated
    }
}
