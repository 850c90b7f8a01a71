// The CUDA side of the device seam: the runtime's calls with their errors turned into DeviceFailure.
#include <cuda_runtime_api.h>

#include "device/device.h"

namespace glm53 {
namespace {

// The runtime keeps a failed call's error until it is read: clear it, or the next unrelated check reports it.
void check(cudaError_t status, const char* call, std::size_t bytes = 0) {
    if (status == cudaSuccess) return;
    cudaGetLastError();
    std::string message = std::string(call) + ": " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) + ")";
    if (bytes) message += ", " + std::to_string(bytes) + " bytes asked";
    throw DeviceFailure(message);
}

class CudaDevice final : public Device {
  public:
    explicit CudaDevice(int index) : Device(kPinChunkBytes), index_(index) {
        int driver = 0, count = 0;
        check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
        if (driver == 0) throw DeviceFailure("no NVIDIA driver is loaded: install one that supports CUDA 13");
        if (driver / 1000 < CUDART_VERSION / 1000) {
            throw DeviceFailure("the NVIDIA driver supports CUDA " + version_text(driver) + ", this build needs " +
                                version_text(CUDART_VERSION) + ": update the driver");
        }
        check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
        if (index < 0 || index >= count) {
            throw DeviceFailure("CUDA device " + std::to_string(index) + " does not exist: " + std::to_string(count) +
                                " visible");
        }
        cudaDeviceProp properties{};
        check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
        if (!properties.canMapHostMemory || !properties.unifiedAddressing) {
            throw DeviceFailure(std::string(properties.name) + " cannot map host memory under unified addressing");
        }
    }

    bool is_cuda() const override { return true; }

    void* alloc(std::size_t bytes) override {
        if (bytes == 0) return nullptr;
        use();
        void* address = nullptr;
        check(cudaMalloc(&address, bytes), "cudaMalloc", bytes);
        return address;
    }

    void free(void* address) noexcept override {
        if (!address) return;
        forgive(cudaSetDevice(index_));
        forgive(cudaFree(address));
    }

    EventHandle event_create() override {
        use();
        cudaEvent_t event = nullptr;
        check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
        return event;
    }

    void event_destroy(EventHandle event) noexcept override {
        if (event) forgive(cudaEventDestroy(static_cast<cudaEvent_t>(event)));
    }

    void event_record(EventHandle event, StreamHandle stream) override {
        use();
        check(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)), "cudaEventRecord");
    }

    bool event_query(EventHandle event) override {
        const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event));
        if (status == cudaErrorNotReady) {
            cudaGetLastError();
            return false;
        }
        check(status, "cudaEventQuery");
        return true;
    }

    void event_wait(EventHandle event) override {
        check(cudaEventSynchronize(static_cast<cudaEvent_t>(event)), "cudaEventSynchronize");
    }

    void stream_wait(StreamHandle stream, EventHandle event) override {
        use();
        check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0),
              "cudaStreamWaitEvent");
    }

    void stream_synchronize(StreamHandle stream) override {
        use();
        check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
    }

  protected:
    void* pin_chunk(void* address, std::size_t bytes) override {
        use();
        check(cudaHostRegister(address, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable), "cudaHostRegister",
              bytes);
        void* alias = nullptr;
        try {
            check(cudaHostGetDevicePointer(&alias, address, 0), "cudaHostGetDevicePointer", bytes);
        } catch (...) {
            unpin_chunk(address);
            throw;
        }
        return alias;
    }

    void unpin_chunk(void* address) noexcept override { forgive(cudaHostUnregister(address)); }

    void copy_piece(void* dst, const void* src, std::size_t bytes, StreamHandle stream) override {
        use();
        check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)), "cudaMemcpyAsync",
              bytes);
    }

  private:
    static std::string version_text(int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); }

    void use() const { check(cudaSetDevice(index_), "cudaSetDevice"); }

    // For destructors, also after the driver shut down: nothing can be done with the error but to clear it.
    static void forgive(cudaError_t status) noexcept {
        if (status != cudaSuccess) cudaGetLastError();
    }

    const int index_;
};

}  // namespace

std::shared_ptr<Device> make_cuda_device(int index) {
    return std::make_shared<CudaDevice>(index);
}

}  // namespace glm53
