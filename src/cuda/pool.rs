//! A context's pool of device memory for stream-ordered allocations.

use super::device::Primary;
use super::driver::{
    CUdevice, CUdevice_attribute, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationHandleType, CUmemAllocationType, CUmemLocation, CUmemLocationType,
    CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUstream, Driver,
};
use crate::error::Result;

/// Memory that goes from one allocation to the next in the order of streams, without asking the device for it.
///
/// It keeps what it once took until it is trimmed: returning memory at every synchronisation would make each step of a model map
/// its workspace anew.
pub(super) struct Pool {
    driver: &'static Driver,
    pool: CUmemoryPool,
}

impl Pool {
    /// A pool on the device whose context is current; `None` where the device has no pools.
    pub fn new(op: &'static str, primary: &Primary) -> Result<Option<Pool>> {
        let supported = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        if primary.attribute(op, supported)? == 0 {
            return Ok(None);
        }
        let driver = primary.driver;
        let properties = CUmemPoolProps {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: location(primary.device),
            win32SecurityAttributes: std::ptr::null_mut(),
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let mut pool = std::ptr::null_mut();
        // SAFETY: `pool` is valid for a write, the properties for a read.
        unsafe { driver.pool_create(op, &mut pool, &properties) }?;
        let pool = Pool { driver, pool };
        let mut threshold = u64::MAX;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the pool is live, and the attribute's value has 64 bits.
        unsafe {
            driver.pool_set_attribute(op, pool.pool, attribute, (&raw mut threshold).cast())?;
        }
        Ok(Some(pool))
    }

    /// Allocates in the order of a stream; an error if there is no memory, too.
    ///
    /// # Safety
    /// The stream is live and of the device, whose context is current.
    pub unsafe fn alloc(
        &self,
        op: &'static str,
        size: usize,
        stream: CUstream,
    ) -> Result<CUdeviceptr> {
        let mut ptr = 0;
        // SAFETY: `ptr` is valid for a write, the pool is live; the rest is the caller's promise.
        unsafe {
            self.driver
                .pool_alloc(op, &mut ptr, size, self.pool, stream)
        }?;
        Ok(ptr)
    }

    /// Returns memory that no allocation uses to the device, until the pool holds `keep` bytes.
    pub fn trim(&self, op: &'static str, keep: usize) -> Result<()> {
        // SAFETY: the pool is live.
        unsafe { self.driver.pool_trim(op, self.pool, keep) }
    }

    /// Bytes that the pool holds of the device's memory, used or not.
    pub fn size(&self, op: &'static str) -> Result<u64> {
        let mut size = 0u64;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
        // SAFETY: the pool is live, and the attribute's value has 64 bits.
        unsafe {
            let value = (&raw mut size).cast();
            self.driver
                .pool_attribute(op, self.pool, attribute, value)?;
        }
        Ok(size)
    }

    /// Lets another device read and write the pool's memory.
    pub fn share(&self, op: &'static str, device: CUdevice) -> Result<()> {
        let access = CUmemAccessDesc {
            location: location(device),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the pool is live, and `access` valid for a read.
        unsafe { self.driver.pool_set_access(op, self.pool, &access, 1) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: made by `new`. Allocations that are still live keep their memory until they are freed.
        let _ = unsafe { self.driver.pool_destroy("context", self.pool) };
    }
}

fn location(device: CUdevice) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device,
    }
}
