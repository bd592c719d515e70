// Greedy decoding of a bundle with ONNX Runtime on the CPU: what a C++ service has to do, in one file. See README.md.
#include <dlfcn.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>
#define ORT_API_MANUAL_INIT  // the library is opened at run time: linking would bind the program to one exact version
#include <onnxruntime_cxx_api.h>

namespace {
using nlohmann::json;
constexpr uint32_t kApi = 21;                    // the functions used here exist since then
constexpr int kFirstMinor = 25;                  // ONNX Runtime 1.25: the first whose CPU provider has TensorScatter
constexpr int64_t kMaxCount = int64_t{1} << 20;  // no count in a config is near this; products of three fit 64 bits
constexpr const char* kHelp =
    "usage: greedy BUNDLE --ids 1,2,3 [--max-new-tokens 128] [--threads 0] [--onnxruntime LIBRARY] [--copy-caches 0]\n"
    "Prints the generated ids on one line. LIBRARY: $TFORMER_ORT_LIBRARY, else libonnxruntime.so.1.";
constexpr const char* kCopied = "TensorScatter: in-place optimization not activated";
enum ExitCode { kDone = 0, kCheckFailed = 1, kUsage = 2, kBadInput = 3, kEnvironment = 4, kStorage = 5, kResources = 6 };

struct Failure { ExitCode code; std::string message; };
[[noreturn]] void fail(ExitCode code, const std::string& message) { throw Failure{code, message}; }

// ---- Files: opened once, never through a link, read in pieces.
struct Contents { std::string text, sha256; int64_t size = 0; };
Contents read_file(const std::filesystem::path& path, bool keep, int64_t limit) {
  const int fd = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);  // a FIFO must not block
  if (fd < 0) fail(errno == ENOENT || errno == ENOTDIR || errno == ELOOP ? kBadInput : kStorage, path.string() + ": " + std::strerror(errno) + ".");
  const std::unique_ptr<const int, void (*)(const int*)> closer(&fd, [](const int* p) { close(*p); });
  struct stat status {};
  if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) fail(kBadInput, path.string() + " is no regular file.");
  if (status.st_nlink > 1) fail(kBadInput, path.string() + " is a hard link; copy the bundle with `cp -r`.");
  if (status.st_size > limit) fail(kBadInput, path.string() + " has more than the expected " + std::to_string(limit) + " bytes.");
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> digest(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  if (!digest || EVP_DigestInit_ex(digest.get(), EVP_sha256(), nullptr) != 1) fail(kEnvironment, "OpenSSL has no SHA-256.");
  Contents contents;
  std::vector<char> piece(1 << 20);
  for (ssize_t n = 1; n != 0; contents.size += n) {
    if ((n = read(fd, piece.data(), piece.size())) < 0) fail(kStorage, path.string() + " cannot be read: " + std::strerror(errno) + ".");
    EVP_DigestUpdate(digest.get(), piece.data(), static_cast<size_t>(n));
    if (keep) contents.text.append(piece.data(), static_cast<size_t>(n));
  }
  std::array<unsigned char, 32> bytes{};
  EVP_DigestFinal_ex(digest.get(), bytes.data(), nullptr);
  for (const unsigned char byte : bytes) contents.sha256 += {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
  return contents;
}

// ---- The manifest: hostile input. Every field that is used is bounded; what is not understood is refused.
[[noreturn]] void bad_manifest(const std::string& what) { fail(kBadInput, "manifest.json: " + what); }

json parse_strictly(const std::string& text) {
  std::vector<std::set<std::string>> keys;
  const auto watch = [&keys](int depth, json::parse_event_t event, json& value) {
    if (depth > 64) bad_manifest("nested more than 64 deep.");
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
      bad_manifest("the key " + value.dump() + " stands there twice.");
    return true;
  };
  try {
    return json::parse(text, watch);
  } catch (const json::parse_error& e) {  // its own text would repeat the file's bytes to a terminal
    bad_manifest("no JSON at byte " + std::to_string(e.byte) + ".");
  } catch (const json::out_of_range&) { bad_manifest("a number that no float holds."); }
}

const json& object(const json& value, const std::string& place, const std::set<std::string>& wanted = {}) {
  if (!value.is_object()) bad_manifest(place + " is no object.");
  for (const auto& key : wanted)
    if (!value.contains(key)) bad_manifest(place + " lacks the field " + key + ".");
  for (const auto& item : value.items())
    if (!wanted.empty() && !wanted.count(item.key())) bad_manifest(place + " has the unknown field " + json(item.key()).dump() + ".");
  return value;
}

int64_t whole(const json& value, const std::string& place, int64_t low, int64_t high) {
  const bool fits = value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX);
  if (!fits || value.get<int64_t>() < low || value.get<int64_t>() > high)
    bad_manifest(place + " is " + value.dump().substr(0, 40) + "; expected a whole number from " + std::to_string(low) + " to " + std::to_string(high) + ".");
  return value.get<int64_t>();
}

struct Bundle {
  std::filesystem::path path;
  int64_t vocab, layers, kv_heads, head_dim, max_length;
  bool half, quantized;
  std::set<int64_t> eos;
};

void verify_files(const Bundle& bundle, const json& files) {
  static const std::regex plain("[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"), hash("[0-9a-f]{64}");
  const auto matches = [](const std::string& text, const std::regex& form) { return text.size() <= 100 && std::regex_match(text, form); };
  object(files, "files");
  for (const auto& [name, record] : files.items()) {  // the whole list first: no file of a bad list is touched
    const std::string place = "files." + json(name).dump().substr(0, 110);
    if (!matches(name, plain) || name == "manifest.json") bad_manifest(place + " is no plain file name inside the bundle.");
    whole(object(record, place, {"sha256", "size"})["size"], place + ".size", 0, int64_t{1} << 53);
    const json& digest = record["sha256"];
    if (!digest.is_string() || !matches(digest, hash)) bad_manifest(place + ".sha256 is not 64 hexadecimal digits.");
  }
  for (const char* name : {"prefill.onnx", "decode.onnx", "weights.bin"})
    if (!files.contains(name)) bad_manifest(std::string("files lacks ") + name + ".");
  for (const auto& [name, record] : files.items()) {
    const std::string path = (bundle.path / name).string(), size = record["size"].dump(), digest = record["sha256"];
    const Contents found = read_file(path, false, record["size"]);
    if (std::to_string(found.size) != size)
      fail(kBadInput, path + " has " + std::to_string(found.size) + " bytes; manifest.json says " + size + ".");
    if (found.sha256 != digest) fail(kBadInput, path + " has sha256 " + found.sha256 + "; manifest.json says " + digest + ".");
  }
}

Bundle open_bundle(const std::filesystem::path& path) {
  const json raw = parse_strictly(read_file(path / "manifest.json", true, int64_t{64} << 20).text);
  const int64_t schema = whole(object(raw, "it").value("schema", json()), "schema", 1, INT64_MAX);
  const json versions = raw.value("versions", json()), made = versions.is_object() ? versions.value("tformer-deploy", json()) : json();
  if (schema > 2) bad_manifest("schema is " + std::to_string(schema) + ", made by tformer-deploy " + made.dump().substr(0, 42) + "; schemas 1 and 2 are read.");
  std::set<std::string> fields{"schema", "config", "dtype", "max_length", "eos_token_ids", "bos_token_id", "source", "versions", "files", "tensors"};
  if (schema == 2) fields.insert("quantization");  // matrices on few levels: that is for ONNX Runtime to know
  object(raw, "it", fields);
  const json& config = object(raw["config"], "config");
  const auto count = [&config](const char* name, int64_t high = kMaxCount) {
    return whole(config.value(name, json()), std::string("config.") + name, 1, high);
  };
  const int64_t max_length = whole(raw["max_length"], "max_length", 1, count("max_length", INT32_MAX));
  const bool half = raw["dtype"] == "fp16" || raw["dtype"] == "bf16";
  Bundle bundle{path, count("vocab_size"), count("n_layers"), count("n_kv_heads"), count("head_dim"), max_length, half, schema == 2, {}};
  if (!raw["eos_token_ids"].is_array()) bad_manifest("eos_token_ids is no list.");
  for (const json& id : raw["eos_token_ids"]) bundle.eos.insert(whole(id, "eos_token_ids", 0, bundle.vocab - 1));
  if (!half && raw["dtype"] != "fp32") bad_manifest("dtype is " + raw["dtype"].dump().substr(0, 40) + ".");
  verify_files(bundle, raw["files"]);
  // Key and value projections have at least one row of this width a layer: sizes that the weights cannot back are refused.
  const int64_t size = raw["files"]["weights.bin"]["size"].get<int64_t>(), elements = bundle.quantized ? 2 * size : size / (half ? 2 : 4);
  if (bundle.kv_heads * bundle.head_dim > elements / bundle.layers / 2 || bundle.vocab > elements)
    bad_manifest("config describes more weights than weights.bin holds.");
  if (raw["dtype"] == "bf16") fail(kEnvironment, "ONNX Runtime's CPU provider has no bf16 MatMul; export the bundle in fp32 or fp16.");
  return bundle;
}

// ---- ONNX Runtime.
void load_onnxruntime(const std::string& library) {
  setenv("ORT_DISABLE_TELEMETRY", "1", 0);  // before it is loaded: recent builds write files under the home folder
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open until the process ends
  if (handle == nullptr) fail(kEnvironment, std::string(dlerror()) + ". Name ONNX Runtime with --onnxruntime or TFORMER_ORT_LIBRARY.");
  const auto base = reinterpret_cast<const OrtApiBase* (*)()>(dlsym(handle, "OrtGetApiBase"));
  if (base == nullptr) fail(kEnvironment, library + " is not ONNX Runtime.");
  const std::string version = base()->GetVersionString();
  if (int minor = 0; std::sscanf(version.c_str(), "1.%d", &minor) != 1 || minor < kFirstMinor || base()->GetApi(kApi) == nullptr)
    fail(kEnvironment, library + " is ONNX Runtime " + version + "; 1." + std::to_string(kFirstMinor) + " or newer is needed.");
  Ort::InitApi(base()->GetApi(kApi));  // only now may an Ort object exist, even an empty one
}

std::atomic<int64_t> cache_copies{0};
void ORT_API_CALL on_log(void*, OrtLoggingLevel level, const char*, const char*, const char*, const char* message) {
  if (std::strstr(message, kCopied) != nullptr) ++cache_copies;
  if (level >= ORT_LOGGING_LEVEL_ERROR) std::cerr << "ONNX Runtime: " << message << '\n';
}

using Caches = std::vector<Ort::Value>;  // key and value of layer 0, of layer 1 …
Caches allocate_caches(const Bundle& bundle, int64_t capacity) {
  Ort::AllocatorWithDefaultOptions allocator;
  const std::array<int64_t, 4> shape{1, bundle.kv_heads, capacity, bundle.head_dim};
  const auto type = bundle.half ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  const auto bytes = static_cast<size_t>(shape[1] * shape[2] * shape[3]) * (bundle.half ? 2 : 4);
  Caches caches;
  for (int64_t i = 0; i < 2 * bundle.layers; ++i) {
    caches.push_back(Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), type));
    std::memset(caches.back().GetTensorMutableData<void>(), 0, bytes);  // unused slots are masked, but 0 × NaN is NaN
  }
  return caches;
}

class Graph {
 public:
  Graph(const Ort::Env& env, const Bundle& bundle, const char* name, int threads) : bundle_(bundle), path_(bundle.path / name) {
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(threads);  // 0: as many as there are cores
    // Both graphs use the weights as they lie in the file; packing would make a second copy for each. Quantised ones must be packed.
    if (!bundle.quantized) options.AddConfigEntry("session.disable_prepacking", "1");
#if defined(__x86_64__)
    // Without VNNI uint8 times int8 is summed in 16 bits, which overflow; this asks for the slower kernels that do not.
    if (bundle.quantized && !__builtin_cpu_supports("avx512vnni")) options.AddConfigEntry("session.x64quantprecision", "1");
#endif
    guarded([&] { session_ = Ort::Session(env, path_.c_str(), options); });
  }

  // One batch row. With the same caches as past and present they are updated in place.
  int64_t next_token(std::vector<int64_t> ids, const int64_t* past_length, Caches& past, Caches& present) {
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    const auto tensor = [&memory](auto& data, const std::vector<int64_t>& shape) {
      return Ort::Value::CreateTensor(memory, data.data(), data.size(), shape.data(), shape.size());
    };
    const auto length = static_cast<int64_t>(ids.size());
    std::array<int64_t, 1> position{length - 1}, past_slot{past_length == nullptr ? 0 : *past_length};
    std::vector<float> logits(static_cast<size_t>(bundle_.vocab));
    guarded([&] {
      Ort::IoBinding binding(session_);
      binding.BindInput("input_ids", tensor(ids, {1, length}));
      if (past_length != nullptr) binding.BindInput("past_lengths", tensor(past_slot, {1}));
      binding.BindInput("logit_positions", tensor(position, {1, 1}));
      binding.BindOutput("logits", tensor(logits, {1, 1, bundle_.vocab}));
      for (size_t i = 0; i < past.size(); ++i) {
        const std::string name = "." + std::to_string(i / 2) + (i % 2 == 0 ? ".key" : ".value");
        binding.BindInput(("past_key_values" + name).c_str(), past[i]);
        binding.BindOutput(("present" + name).c_str(), present[i]);
      }
      session_.Run(Ort::RunOptions(), binding);
    });
    if (!std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); }))
      fail(kBadInput, path_.string() + " gave logits that are no numbers.");
    return std::max_element(logits.begin(), logits.end()) - logits.begin();  // the first of equals
  }

 private:
  template <typename Action>
  void guarded(Action action) const {
    try { action(); } catch (const Ort::Exception& e) { fail(kBadInput, path_.string() + " was refused by ONNX Runtime: " + e.what()); }
  }
  const Bundle& bundle_;
  std::filesystem::path path_;
  Ort::Session session_{nullptr};
};

// ---- Command line.
int64_t number(const std::string& text, const std::string& flag, int64_t low, int64_t high) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high)
    fail(kUsage, flag + " has '" + text + "'; expected a whole number from " + std::to_string(low) + " to " + std::to_string(high) + ".");
  return value;
}

ExitCode run(const std::vector<std::string>& arguments) {
  const char* configured = std::getenv("TFORMER_ORT_LIBRARY");
  std::map<std::string, std::string> flags{{"--ids", ""}, {"--max-new-tokens", "128"}, {"--threads", "0"}, {"--copy-caches", "0"}};
  flags["--onnxruntime"] = configured == nullptr ? "libonnxruntime.so.1" : configured;
  for (size_t i = 1; i < arguments.size(); i += 2) {
    if (flags.count(arguments[i]) == 0 || i + 1 == arguments.size()) fail(kUsage, "'" + arguments[i] + "' is not understood.\n" + kHelp);
    flags[arguments[i]] = arguments[i + 1];
  }
  if (arguments.empty() || flags["--ids"].empty()) fail(kUsage, std::string("BUNDLE and --ids are needed.\n") + kHelp);
  const int64_t max_new_tokens = number(flags["--max-new-tokens"], "--max-new-tokens", 1, kMaxCount);
  const auto threads = static_cast<int>(number(flags["--threads"], "--threads", 0, 1024));
  const bool copying = number(flags["--copy-caches"], "--copy-caches", 0, 1) == 1;
  const Bundle bundle = open_bundle(arguments[0]);
  std::vector<int64_t> ids, generated;
  std::stringstream list(flags["--ids"] + ",");
  for (std::string item; std::getline(list, item, ',');) ids.push_back(number(item, "--ids", 0, bundle.vocab - 1));
  auto length = static_cast<int64_t>(ids.size());
  if (length >= bundle.max_length)
    fail(kUsage, "--ids has " + std::to_string(length) + " ids; prompt and completion may have " + std::to_string(bundle.max_length) + ".");
  load_onnxruntime(flags["--onnxruntime"]);
  const Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "greedy", on_log, nullptr);
  Graph prefill(env, bundle, "prefill.onnx", threads), decode(env, bundle, "decode.onnx", threads);
  const int64_t capacity = std::min(length + max_new_tokens, bundle.max_length);
  Caches caches = allocate_caches(bundle, capacity), others = copying ? allocate_caches(bundle, capacity) : Caches();
  Caches& present = copying ? others : caches;
  generated.push_back(prefill.next_token(ids, nullptr, caches, present));
  for (; length + 1 < capacity && bundle.eos.count(generated.back()) == 0; ++length) {
    if (copying) std::swap(caches, others);
    generated.push_back(decode.next_token({generated.back()}, &length, caches, present));
  }
  for (size_t i = 0; i < generated.size(); ++i) std::cout << (i == 0 ? "" : " ") << generated[i];
  if (!(std::cout << std::endl)) fail(kStorage, "The ids could not be written.");
  std::cerr << "cache copies: " << cache_copies << '\n';
  return cache_copies == 0 ? kDone : kCheckFailed;
}
}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const Failure& failure) {
    std::cerr << "greedy: " << failure.message << '\n';
    return failure.code;
  } catch (const std::exception& e) {  // no memory for the caches, or for anything else
    std::cerr << "greedy: " << e.what() << '\n';
    return kResources;
  }
}
