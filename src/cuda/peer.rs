//! Copies between devices.

use std::sync::atomic::Ordering;

use super::Cuda;
use crate::backend::{CopyKind, Device, Stream};
use crate::error::Result;

impl Cuda {
    /// Queues a copy from another device's memory on a stream of this one.
    ///
    /// # Safety
    /// Both ranges are valid on their devices until the copy has run; the stream is live and of this device.
    pub unsafe fn copy_peer(
        &self,
        op: &'static str,
        dst: *mut u8,
        from: &Cuda,
        src: *const u8,
        size: usize,
        stream: Stream,
    ) -> Result<()> {
        if self.resources.ordinal() == from.resources.ordinal() {
            // SAFETY: the caller's promise.
            return unsafe { self.copy(op, dst, src, size, CopyKind::DeviceToDevice, stream) };
        }
        if size == 0 {
            return Ok(());
        }
        let (here, there) = (&self.resources.primary, &from.resources.primary);
        let driver = here.driver;
        let raw = stream.as_raw().cast();
        let entered = here.enter(op)?;
        // SAFETY: the caller's promise.
        let captured = unsafe { driver.is_capturing(op, raw) }?;
        drop(entered);
        // Giving access is no work of a stream, so it cannot be captured; without it the driver copies by way of the host.
        if !captured {
            self.connect(op, from);
        }
        let _entered = here.enter(op)?;
        let (dst, src) = (dst.addr() as u64, src.addr() as u64);
        let (to, from) = (here.context, there.context);
        // SAFETY: the caller's promise; both contexts are retained.
        unsafe { driver.peer_to_peer(op, dst, to, src, from, size, raw) }
    }

    /// Lets two devices reach each other's memory, if they can. Done once for a pair; that it failed shows only in speed.
    fn connect(&self, op: &'static str, other: &Cuda) {
        let bit = 1u64.checked_shl(other.ordinal().unsigned_abs());
        let bit = bit.unwrap_or(0);
        if self.connected.load(Ordering::Acquire) & bit != 0 {
            return;
        }
        for (from, to) in [(self, other), (other, self)] {
            let pool = &to.pool;
            let (from, to) = (&from.resources.primary, &to.resources.primary);
            let driver = from.driver;
            let mut can = 0;
            // SAFETY: `can` is valid for a write; both devices came from the driver.
            let asked =
                unsafe { driver.device_can_access_peer(op, &mut can, from.device, to.device) };
            if asked.is_err() || can == 0 {
                continue;
            }
            let Ok(_entered) = from.enter(op) else {
                continue;
            };
            // SAFETY: a context is current, the other one retained. Whoever shares the contexts may have given access already.
            let _ = unsafe { driver.enable_peer_access(op, to.context, 0) };
            if let Some(pool) = pool {
                let _ = pool.share(op, from.device);
            }
        }
        self.connected.fetch_or(bit, Ordering::Release);
    }
}
