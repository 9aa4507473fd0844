//! cuBLASLt: opened at run time where there is one, for products of many rows.
//!
//! Its descriptors are made on the stack for each call, which is cheap; its choice of an algorithm is not, and is remembered.

mod bindings;
mod product;

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use crate::backend::Stream;
use crate::cuda::tuning::{Linear, Server};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::tensor::Scratch;
use bindings::*;
pub(super) use product::Product;
use product::{Key, rounded_rows};

/// The most that is asked for: what cuBLAS itself has by default on Hopper, and more than nearly all that it chooses needs.
const MAX_WORKSPACE: usize = 32 << 20;

/// Descriptors of a product.
struct Descriptors {
    desc: Opaque,
    weight: Opaque,
    x: Opaque,
    residual: Opaque,
    out: Opaque,
}

/// Algorithms that are asked for, the one that should be the fastest first.
const RANKED: usize = 5;
/// Shapes whose algorithms are remembered.
const SLOTS: usize = 1024;
/// Slots that are looked at for one shape.
const PROBES: usize = 8;

/// An algorithm, and the workspace that it needs.
type Choice = (Algorithm, usize);

/// What was chosen for a key.
#[derive(Clone, Copy, Debug)]
struct Chosen {
    /// Of those without a workspace.
    alone: Option<Choice>,
    /// Of all, if it needs a workspace.
    with: Option<Choice>,
}

/// Written once, so that readers need no lock.
type Slot = OnceLock<(Key, Chosen)>;

/// A handle on one device, with the algorithms that were chosen there.
pub(super) struct Library {
    functions: &'static Functions,
    handle: HandlePtr,
    /// By hash of the key. A shape that finds no slot is chosen for at each call.
    chosen: Vec<Slot>,
    tuning: Linear,
}

impl Library {
    /// The library on the device of the current context; `None` if there is none or it does not start there.
    ///
    /// # Errors
    /// The host has no memory for what is remembered of its choices.
    pub fn open(op: &'static str, tuning: Linear) -> Result<Option<Library>> {
        let Some(functions) = functions() else {
            return Ok(None);
        };
        let mut chosen = Vec::new();
        chosen
            .try_reserve_exact(SLOTS)
            .map_err(|_| Error::out_of_host_memory(op, SLOTS * size_of::<Slot>()))?;
        chosen.extend((0..SLOTS).map(|_| Slot::new()));
        let mut handle = std::ptr::null_mut();
        // SAFETY: the handle is valid for a write.
        if unsafe { (functions.create)(&mut handle) } != SUCCESS {
            return Ok(None);
        }
        Ok(Some(Library {
            functions,
            handle,
            chosen,
            tuning,
        }))
    }

    /// Gives the handle back. Its device's context is current, and it is not used again.
    pub fn close(&mut self) {
        // SAFETY: made by `open`; the owner's promise.
        unsafe { (self.functions.destroy)(self.handle) };
    }

    /// Who serves products with nearly as many rows as this, which share an algorithm.
    fn server(&self, p: &Product, with_workspace: bool) -> Server {
        // The tables are of layers' products; of gradients none was measured.
        if p.weight_by_columns {
            return match with_workspace {
                true => Server::Workspace,
                false => Server::Library,
            };
        }
        let rows = rounded_rows(p.rows);
        self.tuning
            .server(p.dtype, rows, p.out_features, p.in_features, with_workspace)
    }

    /// Whether a product may be faster with a workspace.
    pub fn has_use_for_workspace(&self, p: &Product) -> bool {
        self.server(p, true) == Server::Workspace
    }

    /// The workspace of the algorithm that serves a product best; 0 if none is better with one. What lies at addresses does not count,
    /// but their alignment does.
    pub fn workspace_size(&self, op: &'static str, p: &Product) -> Result<usize> {
        let chosen = self.remembered(op, p, p.key())?;
        Ok(chosen.with.map_or(0, |(_, size)| size))
    }

    /// Queues a product, of at least one element in each dimension, with the algorithm that serves it best if `scratch` is enough for it.
    /// If not, and there is one without a workspace, with that one, if it is wanted `alone`; and `false` otherwise.
    ///
    /// # Safety
    /// The pointers are valid on the current context's device until the work has run, and the stream is live and of it.
    pub unsafe fn multiply(
        &self,
        op: &'static str,
        p: &Product,
        scratch: Scratch,
        alone: bool,
        stream: Stream,
    ) -> Result<bool> {
        let key = p.key();
        let chosen = self.remembered(op, p, key)?;
        let with = chosen.with.filter(|(_, size)| *size <= scratch.size);
        let Some(choice) = with.or(chosen.alone.filter(|_| alone)) else {
            return Ok(false);
        };
        let mut d = self.describe(op, p, p.rows)?;
        // SAFETY: the caller's promise.
        let mut status = unsafe { self.run(p, &mut d, &choice, scratch, stream) };
        if matches!(status, INVALID_VALUE | NOT_SUPPORTED) && key.sizes[0] != p.rows {
            // The algorithm of the rounded shape does not serve this one.
            let Some(choice) = self.choose(op, p, p.rows, choice.1)? else {
                return Ok(false);
            };
            // SAFETY: the caller's promise.
            status = unsafe { self.run(p, &mut d, &choice, scratch, stream) };
        }
        check(op, "cublasLtMatmul", status)?;
        Ok(true)
    }

    /// # Safety
    /// As [`Library::multiply`]; the choice's workspace fits `scratch`.
    unsafe fn run(
        &self,
        p: &Product,
        d: &mut Descriptors,
        (algorithm, workspace_size): &Choice,
        scratch: Scratch,
        stream: Stream,
    ) -> Status {
        let [weight, x, residual, out] =
            p.pointers().map(std::ptr::without_provenance_mut::<c_void>);
        let alpha = 1.0f32;
        let beta = if p.residual.is_some() { 1.0f32 } else { 0.0 };
        let workspace = match workspace_size {
            0 => std::ptr::null_mut(),
            _ => scratch.ptr,
        };
        // SAFETY: the descriptors say what lies at the pointers; the rest is the caller's promise.
        unsafe {
            (self.functions.matmul)(
                self.handle,
                d.desc.ptr(),
                (&raw const alpha).cast(),
                weight,
                d.weight.ptr(),
                x,
                d.x.ptr(),
                (&raw const beta).cast(),
                residual,
                d.residual.ptr(),
                out,
                d.out.ptr(),
                algorithm,
                workspace.cast(),
                *workspace_size,
                stream.as_raw(),
            )
        }
    }

    /// What was chosen for a key, chosen now unless it was before.
    fn remembered(&self, op: &'static str, p: &Product, key: Key) -> Result<Chosen> {
        let first = key.hash();
        let slots = (0..PROBES).map(|i| first.wrapping_add(i) % SLOTS);
        let mut free = None;
        for slot in slots.filter_map(|slot| self.chosen.get(slot)) {
            match slot.get() {
                Some((other, chosen)) if *other == key => return Ok(*chosen),
                Some(_) => {}
                None => {
                    free = Some(slot);
                    break;
                }
            }
        }
        let choose = |limit| self.choose(op, p, key.sizes[0], limit);
        let chosen = Chosen {
            alone: choose(0)?,
            with: match self.has_use_for_workspace(p) {
                true => choose(MAX_WORKSPACE)?.filter(|(_, size)| *size > 0),
                false => None,
            },
        };
        tracing::debug!(
            "{op}: cuBLASLt serves {} rows of {} by {} in {}, {} workspace{}",
            p.rows,
            p.in_features,
            p.out_features,
            p.dtype,
            match (chosen.alone, chosen.with) {
                (_, Some((_, size))) => text!("best with {size} bytes of"),
                (Some(_), None) => text!("without"),
                (None, None) => text!("not: it has no algorithm with or without a"),
            },
            if free.is_some() {
                ""
            } else {
                "; chosen at each call, too many shapes are remembered"
            },
        );
        if let Some(slot) = free {
            // Another thread may have been faster, with this shape or another: then it is chosen for once more.
            let _ = slot.set((key, chosen));
        }
        Ok(chosen)
    }

    /// Asks for the best algorithm within a workspace.
    fn choose(
        &self,
        op: &'static str,
        p: &Product,
        rows: usize,
        limit: usize,
    ) -> Result<Option<Choice>> {
        let mut d = self.describe(op, p, rows)?;
        let mut preference = Opaque::new();
        // SAFETY: the preference has room for the library's struct, and is initialised before it is used; values have the sizes
        // that the attributes ask for.
        unsafe {
            let initialised = (self.functions.preference_init)(preference.ptr(), Opaque::SIZE);
            check(op, "cublasLtMatmulPreferenceInit", initialised)?;
            let mut set = |attribute: c_int, value: *const c_void, size: usize| {
                let status =
                    (self.functions.preference_set)(preference.ptr(), attribute, value, size);
                check(op, "cublasLtMatmulPreferenceSetAttribute", status)
            };
            let workspace = limit as u64;
            set(PREFERENCE_MAX_WORKSPACE, (&raw const workspace).cast(), 8)?;
            let schemes = REDUCTION_COMPUTE_TYPE;
            set(PREFERENCE_REDUCTION_SCHEMES, (&raw const schemes).cast(), 4)?;
            for (attribute, alignment) in (PREFERENCE_ALIGNMENT_A..).zip(p.alignments()) {
                set(attribute, (&raw const alignment).cast(), 4)?;
            }
        }
        let mut results = [HeuristicResult::default(); RANKED];
        let mut found = 0;
        // SAFETY: everything is initialised; there is room for as many results as are asked for.
        let status = unsafe {
            (self.functions.heuristic)(
                self.handle,
                d.desc.ptr(),
                d.weight.ptr(),
                d.x.ptr(),
                d.residual.ptr(),
                d.out.ptr(),
                preference.ptr(),
                RANKED as c_int,
                results.as_mut_ptr(),
                &mut found,
            )
        };
        if status == NOT_SUPPORTED {
            return Ok(None);
        }
        check(op, "cublasLtMatmulAlgoGetHeuristic", status)?;
        let found = usize::try_from(found).unwrap_or(0);
        let usable = |r: &&HeuristicResult| r.status == SUCCESS && r.workspace_size <= limit;
        let mut usable = results.iter().take(found).filter(usable);
        let first = usable.clone().next();
        let wanted = match self.server(p, false) {
            Server::Cluster(shape) if limit == 0 => Some(shape),
            _ => None,
        };
        let chosen = wanted.and_then(|wanted| usable.find(|r| self.cluster(r) == Some(wanted)));
        Ok(chosen.or(first).map(|r| (r.algorithm, r.workspace_size)))
    }

    /// The cluster of an algorithm, where the library's version and the device know of such.
    fn cluster(&self, result: &HeuristicResult) -> Option<u16> {
        let mut cluster = 0u16;
        let mut written = 0;
        // SAFETY: the value has the size that the attribute asks for; the library reads the algorithm.
        let status = unsafe {
            (self.functions.algorithm_get)(
                &result.algorithm,
                ALGORITHM_CLUSTER_SHAPE,
                (&raw mut cluster).cast(),
                size_of::<u16>(),
                &mut written,
            )
        };
        (status == SUCCESS).then_some(cluster)
    }

    /// Describes `outᵀ = W xᵀ` with column-major matrices: what is row-major is the transpose of what is column-major.
    fn describe(&self, op: &'static str, p: &Product, rows: usize) -> Result<Descriptors> {
        let code = |dtype| {
            Ok(match dtype {
                DType::F16 => R_16F,
                DType::Bf16 => R_16BF,
                DType::F32 => R_32F,
                other => {
                    let message = text!("cuBLASLt was asked for a product of {other}");
                    return Err(Error::Internal { op, message });
                }
            })
        };
        let (dtype, out_dtype) = (code(p.dtype)?, code(p.out_dtype)?);
        let mut d = Descriptors {
            desc: Opaque::new(),
            weight: Opaque::new(),
            x: Opaque::new(),
            residual: Opaque::new(),
            out: Opaque::new(),
        };
        let (k, n, m) = (p.in_features as u64, p.out_features as u64, rows as u64);
        let (_, residual_stride) = p.residual.unwrap_or((0, p.out_stride));
        let turned = |turned: bool, (rows, columns)| match turned {
            false => (rows, columns),
            true => (columns, rows),
        };
        let weight = turned(p.weight_by_columns, (k, n));
        let x = turned(p.x_by_columns, (k, m));
        let layouts = [
            (&mut d.weight, dtype, weight, p.weight_stride),
            (&mut d.x, dtype, x, p.x_stride),
            (&mut d.residual, out_dtype, (n, m), residual_stride),
            (&mut d.out, out_dtype, (n, m), p.out_stride),
        ];
        // SAFETY: the descriptors have room for the library's structs; values have the sizes that the attributes ask for.
        unsafe {
            let f = self.functions;
            let status = (f.desc_init)(d.desc.ptr(), Opaque::SIZE, COMPUTE_32F, R_32F);
            check(op, "cublasLtMatmulDescInit", status)?;
            let mut set = |attribute: c_int, value: *const c_void, size: usize| {
                let status = (f.desc_set)(d.desc.ptr(), attribute, value, size);
                check(op, "cublasLtMatmulDescSetAttribute", status)
            };
            let transposed = OP_T;
            if !p.weight_by_columns {
                set(DESC_TRANSA, (&raw const transposed).cast(), 4)?;
            }
            if p.x_by_columns {
                set(DESC_TRANSB, (&raw const transposed).cast(), 4)?;
            }
            if let Some(bias) = p.bias {
                let epilogue = EPILOGUE_BIAS;
                set(DESC_EPILOGUE, (&raw const epilogue).cast(), 4)?;
                set(DESC_BIAS_POINTER, (&raw const bias).cast(), 8)?;
            }
            for (layout, dtype, (rows, columns), stride) in layouts {
                let stride = stride as i64;
                let status =
                    (f.layout_init)(layout.ptr(), Opaque::SIZE, dtype, rows, columns, stride);
                check(op, "cublasLtMatrixLayoutInit", status)?;
            }
        }
        Ok(d)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn keys_spread_over_slots() {
        let mut taken = vec![false; SLOTS];
        let mut without = 0;
        // The layers of a model, at the numbers of rows that are told apart.
        for (in_features, out_features) in
            [(4096, 4096), (4096, 6144), (4096, 28672), (14336, 4096)]
        {
            let rows: BTreeSet<_> = (1..=8192).map(rounded_rows).collect();
            for rows in rows {
                let key = Key {
                    sizes: [rows, in_features, out_features],
                    strides: [in_features, in_features, 0, out_features],
                    traits: 3 | 0b10000_10000_10000_10000 << 8,
                };
                let first = key.hash();
                let mut slots = (0..PROBES).map(|i| first.wrapping_add(i) % SLOTS);
                without += usize::from(slots.all(|slot| std::mem::replace(&mut taken[slot], true)));
            }
        }
        assert!(without < 10, "{without}");
    }
}
